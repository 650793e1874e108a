"""Accounts that cannot be right. All need the event stream."""
