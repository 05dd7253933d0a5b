"""Drawings of a record that is computed elsewhere: the same numbers whoever draws them."""
