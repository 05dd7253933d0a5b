"""The worker's measuring for `autotune calibrate`: kernels one by one, and what the host takes."""
