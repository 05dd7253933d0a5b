"""For a prediction that turned out wrong: what was predicted in full, and where a real run parts from it."""
