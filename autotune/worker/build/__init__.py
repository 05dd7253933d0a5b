"""The model that is trained: architecture, adapter, quantisation."""
