"""Attention as other code wrote it, where that changes what is alive or how long it takes.

Each stands in for today's in a trace on `meta`. Written after transformers 4.16.2
models/bert/modeling_bert.py and 4.28.1 models/distilbert/modeling_distilbert.py and pytorch_utils.py,
pytorch aten/src/ATen/native/cuda/SoftMax.cu, and Qwen/Qwen-7B modeling_qwen.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers.models.bert import modeling_bert
from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention
from transformers.models.qwen2 import modeling_qwen2

from autotune.worker.trace import sdpa


class _SoftmaxKeepingInput(torch.autograd.Function):
    """torch's before 1.11, whose backward pass took the input too, for its dtype."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        out = torch._softmax(scores, -1, False)
        ctx.save_for_backward(scores, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        scores, out = ctx.saved_tensors
        gradient: torch.Tensor = torch._softmax_backward_data(gradients[0], out, -1, scores.dtype)
        return gradient


def _bert_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """BertSelfAttention.forward of 2022: a mask is always added, and under autocast it is float32."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores + _zeros(query.shape[0], 1, 1, query.shape[2])
    weights: torch.Tensor = _SoftmaxKeepingInput.apply(scores)
    weights = F.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _distilbert_attention(
    self: Any, hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """MultiHeadSelfAttention.forward of 4.28: the masked scores live until it returns."""
    shape = (*hidden_states.shape[:2], -1, self.attention_head_size)
    query = self.q_lin(hidden_states).view(shape).transpose(1, 2)
    key = self.k_lin(hidden_states).view(shape).transpose(1, 2)
    value = self.v_lin(hidden_states).view(shape).transpose(1, 2)
    query = query / math.sqrt(self.attention_head_size)
    scores = torch.matmul(query, key.transpose(2, 3))
    mask = _zeros(shape[0], 1, 1, shape[1]).bool().expand_as(scores)
    scores = scores.masked_fill(mask, -math.inf)
    weights = self.dropout(F.softmax(scores, dim=-1))
    context = torch.matmul(weights, value)
    context = context.transpose(1, 2).contiguous().view(hidden_states.shape)
    return self.out_lin(context), None


def _fused_rotary(
    query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen 1's with flash-attn installed: each is cast to float32, turned by one kernel, and cast back."""
    turned = [torch.neg(each.float()).to(each.dtype) for each in (query, key)]
    return turned[0], turned[1]


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="meta")


OLD_ATTENTIONS = {
    "BERT 4.16, torch 1.10": (modeling_bert, "eager_attention_forward", _bert_attention),
    "DistilBERT 4.28": (DistilBertSelfAttention, "forward", _distilbert_attention),
    "Qwen 1, flash-attn": (modeling_qwen2, "apply_rotary_pos_emb", _fused_rotary),
    "torch before CUDA 13": (sdpa, "PREFERS_CUDNN", False),
}
