"""A matrix of workloads, kept tuned on this machine.

What changed is tuned again, drift is distinguished from noise, and whatever is new is said in a digest.
"""
