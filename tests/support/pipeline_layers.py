"""The part of a model that one process of a pipeline runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Layers(nn.Module):
    """Some layers of a model, behind its embedding where they are the first, its head behind the last."""

    def __init__(self, model: Any, first: int, count: int) -> None:
        super().__init__()
        layers = model.model.layers
        self.rotary_emb = model.model.rotary_emb
        self.embed_tokens = model.model.embed_tokens if first == 0 else None
        self.layers = nn.ModuleList(layers[first : first + count])
        is_last = first + count == len(layers)
        self.norm: Any = model.model.norm if is_last else None
        self.lm_head: Any = model.lm_head if is_last else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = given if self.embed_tokens is None else self.embed_tokens(given)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        embeddings = self.rotary_emb(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=embeddings,
                position_ids=positions,
            )
        return hidden if self.lm_head is None else self.lm_head(self.norm(hidden))
