"""How long commands take, and what large databases cost."""
