"""The page of a running service: what is wrong, the pool's balance, every block and every request, live."""
