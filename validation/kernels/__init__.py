"""Fits and checks of autotune.speed's kernels against the public tables of studies/kernels/tables."""
