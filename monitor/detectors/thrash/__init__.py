"""Work that is done, thrown away and done again."""
