"""Bytes of a training step: PyTorch's caching allocator, optimizer steps, trace algebra. No settings."""
