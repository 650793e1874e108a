"""Memory that is never freed. A block is in one of these findings at most: its holder decides in which."""
