"""Work that is dealt out unequally."""
