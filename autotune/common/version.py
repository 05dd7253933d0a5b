"""The version of autotune, in a module of its own, since the package's root imports everything else."""

__version__ = "0.1.0"
