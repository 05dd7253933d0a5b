"""Finds the fastest fine-tuning configuration of a model that fits a GPU."""

from __future__ import annotations

__version__ = "0.1.0"
