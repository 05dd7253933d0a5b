"""Starts workers, follows them and ends them, without torch."""
