"""What becomes of every architecture: `python -m validation.architectures`."""
