"""Nouns that travel between rooms: question, estimate, measurement, answer; to and from JSON."""
