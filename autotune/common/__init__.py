"""Tools that any program needs: bytes and seconds, files, the log, secrets, JSON records."""
