"""Objects for a user's own program: the answer as its libraries take it, and a callback."""
