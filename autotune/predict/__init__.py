"""Traces -> Estimates: predicted memory and time of any number of configurations on one card."""
