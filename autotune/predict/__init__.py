"""Predicted memory and time of any number of configurations on one card, from traces."""
