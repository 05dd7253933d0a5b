"""Questions the other way round: the most that still fits, the least card that would do."""
