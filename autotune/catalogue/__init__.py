"""Facts with their sources: cards, models, which attention they have, what is installed here."""
