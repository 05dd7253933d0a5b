"""Scripts that make the figures of README.md and of studies/; each names its folder."""
