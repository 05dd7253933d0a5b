"""Builds the model that is trained: architecture, adapter, quantisation."""
