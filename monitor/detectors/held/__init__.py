"""What fills the pool and is no leak, so that nobody looks for one. Information, never above."""
