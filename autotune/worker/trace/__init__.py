"""A training step on PyTorch's `meta` device: every allocation and every kernel, as CUDA would have them."""
