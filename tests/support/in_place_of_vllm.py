"""A generator where TRL hands over to vLLM, which needs a card: nothing is computed for its tokens."""

from __future__ import annotations

from typing import Any


class InPlaceOfVllm:
    """Stands for TRL's VLLMGeneration, and no more of it.

    It writes completions of full length, and gives the odds of their tokens, where they are asked for.
    """

    def __init__(self, *, logprobs: int | None, max_completion_length: int, **_: Any) -> None:
        self.has_odds = logprobs is not None
        self.num_new = max_completion_length

    def sync_weights(self) -> None:
        """Take nothing over."""

    def generate(self, *, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        """Write as many completions as there are prompts."""
        written = [[3 + n for n in range(self.num_new)] for _ in prompts]
        odds = [[[-1.0] for _ in range(self.num_new)] for _ in prompts] if self.has_odds else None
        return prompts, written, odds, None
