"""The tests, room by room; what they share is in support/."""
