"""What falls from full to nothing: usage, or what the prefix cache gives."""
