"""What a user's own program is given: the answer as objects of its libraries, and a callback."""
