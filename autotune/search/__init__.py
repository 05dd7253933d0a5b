"""The funnel: from a question to an answer, predicted or measured."""
