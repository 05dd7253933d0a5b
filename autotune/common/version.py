"""The version of autotune: of its own, since the package's root reaches for everything else."""

__version__ = "0.1.0"
