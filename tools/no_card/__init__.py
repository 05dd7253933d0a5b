"""A CUDA that computes nothing, for where there is no card: `python -m tools.no_card`."""

DRIVER = "no card"
"""What nvml.cpp calls the driver, and what is recorded of it."""
