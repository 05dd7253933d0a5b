"""What may be set: methods, optimizers, knobs, the rules between them, and the spaces that are searched."""
