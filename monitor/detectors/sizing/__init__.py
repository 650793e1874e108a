"""Memory that is divided up wrongly, and advice that would do so."""
