"""Settings that may vary: methods, optimizers, knobs, the rules between them, and the spaces searched."""
