"""Cards that probes may run on: this machine's one, several of this machine, or a Ray cluster's."""
