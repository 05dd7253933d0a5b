"""A matrix of workloads, kept tuned on this machine: what changed is tuned again, drift is told from
noise, and whatever is new is said in a digest."""
