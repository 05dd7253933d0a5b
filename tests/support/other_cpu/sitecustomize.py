"""Lets every Python process with this folder on its PYTHONPATH say that its machine has another CPU."""

from autotune.catalogue import installed

NAME = "Another CPU"

installed.cpu_name = lambda: NAME
