"""What every room uses: errors, limits, text formatting, bounded HTTP, supervised threads, plug-ins."""
