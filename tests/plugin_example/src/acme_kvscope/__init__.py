"""What Acme adds to kvscope."""
