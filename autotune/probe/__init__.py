"""Configurations measured: one at a time, chosen by a sampler, until the winner is confirmed."""
