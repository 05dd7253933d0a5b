"""Predictions held against a real card: `python -m tools.gpu_check`, which __main__.py describes."""
