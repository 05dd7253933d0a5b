"""The user's training so far, read from other trainers' files, and the same files with the answer."""
