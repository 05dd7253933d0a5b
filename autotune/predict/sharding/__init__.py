"""A training run that several GPUs share: what each of them holds and does."""
