"""What the observer itself cannot see. Information, never above."""
