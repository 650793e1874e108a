"""A module whose import raises."""

raise RuntimeError("this module cannot be imported")
