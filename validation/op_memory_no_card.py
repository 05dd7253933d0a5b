r"""What single CUDA operations allocate beside what they return, in every architecture's step, no card.

    python -m tools.no_card --gpu H200 --memory-gib 16384 -- \
        python -m validation.op_memory_no_card TYPES

A forward and backward of each type (as in architectures_no_card.py, of LAYERS layers) runs on "cuda", and
between any two operations PyTorch's allocator is asked what it was asked for. Kept are the operations that
asked for more than they returned, each with its operands' shapes and strides, once. Beside it stands what
autotune takes the kernel to allocate (worker.trace.kernel_buffers). Writes studies/op-memory-no-card/.

Nothing is computed (tools/no_card). What cuDNN asks for its own workspaces is not known.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autotune.worker.build.model import load_config
from autotune.worker.build.real_model import materialize
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.kernel_buffers import hidden_buffers
from validation import architectures_no_card as architectures

STUDY = Path(__file__).parents[1] / "studies" / "op-memory-no-card"
LAYERS = 4
DTYPE = torch.bfloat16


class Watch(TorchDispatchMode):
    """Notes each operation that asked the allocator for more than it returned."""

    def __init__(self, buffers: Any) -> None:
        super().__init__()
        self._buffers = buffers
        self.rows: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        before = _requested_bytes("current")
        torch.cuda.reset_peak_memory_stats()
        out = func(*args, **kwargs)
        hidden_bytes = _requested_bytes("peak") - max(before, _requested_bytes("current"))
        fresh = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(out))
        predicted = sum(b.size_bytes for b in self._buffers(func, args, out)) if fresh else 0
        if hidden_bytes or predicted:
            row = {"operation": str(func), "args": tree_map(_plain, args)}
            row |= {"kwargs": {k: _plain(v) for k, v in kwargs.items() if k == "dtype"}}
            row |= {"hidden_bytes": hidden_bytes, "predicted_bytes": predicted}
            self.rows.setdefault(json.dumps(row), row)
        return out


def _requested_bytes(moment: str) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"][moment])


def _plain(value: Any) -> Any:
    """What JSON can say of an operand, its shape and strides instead of the tensor."""
    if isinstance(value, torch.Tensor):
        return {"shape": [*value.shape], "stride": [*value.stride()], "dtype": _plain(value.dtype)}
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def watched(kind: str, device: Device) -> list[dict[str, Any]]:
    """The operations of one type's step."""
    import transformers

    of = architectures.subject(kind, "causal-lm")
    config = load_config(of.source.config)
    config.use_cache = False
    for attention in architectures.ATTENTIONS:
        try:
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=DTYPE, attn_implementation=attention
                )
            break
        except ValueError:
            if attention == architectures.ATTENTIONS[-1]:
                raise
    materialize(model, DTYPE, torch.device("cuda"))
    model.train()
    ids = torch.zeros(architectures.MICRO_BATCH, of.length, dtype=torch.int64, device="cuda")
    with Watch(functools.partial(hidden_buffers, device.multiprocessors)) as watch:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    return list(watch.rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="+", help="model types")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    architectures.LAYERS = LAYERS
    card = architectures.card_here()
    assert card.compute_capability is not None
    assert card.num_sms is not None
    device = Device(
        compute_capability=card.compute_capability, cublas_workspace_bytes=0, num_sms=card.num_sms
    )
    for dtype in (DTYPE, torch.float32):  # The workspaces of both threads.
        weight = torch.ones(16, 16, dtype=dtype, device="cuda", requires_grad=True)
        (weight @ weight).sum().backward()
    rows: dict[str, dict[str, Any]] = {}
    for kind in options.types:
        try:
            found = watched(kind, device)
        except Exception as error:
            print(f"{kind}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            found = []
        for row in found:
            rows.setdefault(json.dumps(row), {"model_type": kind, **row})
        gc.collect()
        torch.cuda.empty_cache()
    STUDY.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows.values())
    (STUDY / "rows.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
