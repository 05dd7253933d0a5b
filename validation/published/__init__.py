"""Runs that others published: what they did, and what their programs did otherwise."""
