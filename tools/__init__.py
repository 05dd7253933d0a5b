"""Programs for owners of a card, and for those who have none."""
