"""A few real training steps of one configuration, watched, timed and checked."""
