"""Tools for a prediction that was wrong: the prediction in full, and where a real run parts from it."""
