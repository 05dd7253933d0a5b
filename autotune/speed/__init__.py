"""Seconds of a training step: kernels priced on a card. No torch, no settings."""
