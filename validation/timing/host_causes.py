"""What the Trainer, LoRA, clipping and the optimizer cost the host beside a plain operation.

    python -m validation.timing.host_causes            (some minutes on two cores)

Llama's layers of next to no size run on the CPU, all cases in turn, so that a busy moment of the machine
meets them all. Every figure is a multiple of the time of one operation of a full fine-tuning's forward pass
in the same run (the unit): a machine that is busy, or slower, makes all of them longer alike.
autotune/speed/host.py takes the multiples times the unit of an idle machine. Writes
studies/host-time/causes.json and the table of its README.md.

Differences between a depth of 2 and of 8 layers give what an operation, a module or a tensor costs; a model
of one layer shows what is fixed. Processor time of one thread, the shortest of many. Not measured: autocast,
whose casts the CPU follows with kernels in 16 bits that are no faster; 4-bit weights; GradScaler; DDP.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, logging

from validation.published.tables import write_sections
from validation.timing import host_time

STUDY = Path(__file__).parents[2] / "studies" / "host-time"
SINGLE, SHALLOW, DEEP = 1, 2, 8
ROUNDS = 5
TRAINER_STEPS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One cause of host time, in units of a plain operation."""

    name: str
    per: str
    units: float


def batch() -> dict[str, torch.Tensor]:
    ids = torch.ones((2, 16), dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def passes(model: Any) -> tuple[float, float]:
    """Forward and backward pass, seconds."""
    inputs = batch()
    start = time.thread_time()
    loss = model(**inputs)["loss"]
    middle = time.thread_time()
    loss.backward()
    return middle - start, time.thread_time() - middle


def of_modules(model: Any) -> tuple[float, float]:
    """Seconds of what the Trainer asks of every module in each micro-step: (train(), floating_point_ops)."""
    start = time.thread_time()
    model.train()
    middle = time.thread_time()
    model.num_parameters(exclude_embeddings=True)
    return middle - start, time.thread_time() - middle


def of_clipping(model: Any) -> tuple[float, float]:
    """(clipping but for its foreach kernels, zeroing) of gradients that are there, seconds."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters]
    start = time.thread_time()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    clipped = time.thread_time()
    norms = torch._foreach_norm(
        gradients
    )  # what the CPU loops over and a GPU does in a few launches
    torch._foreach_mul_(gradients, torch.ones(()))
    torch.stack(norms)
    kernels = time.thread_time()
    model.zero_grad()
    return clipped - start - (kernels - clipped), time.thread_time() - kernels


def of_step(optimizer: torch.optim.Optimizer) -> tuple[float]:
    start = time.thread_time()
    optimizer.step()
    return (time.thread_time() - start,)


class _Ends(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.thread_time())


def of_trainer(model: Any, accumulation: int) -> tuple[float]:
    """A whole optimizer step of the Trainer, seconds."""
    ends = _Ends()
    row = {name: value[0].tolist() for name, value in batch().items()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=accumulation,
                max_steps=TRAINER_STEPS,
                use_cpu=True,
                logging_steps=1000,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                optim="adamw_torch_fused",
            ),
            train_dataset=[row] * 2 * (TRAINER_STEPS + 1) * accumulation,
            callbacks=[ends],
        )
        trainer.train()
    return (min(b - a for a, b in zip(ends.seconds[1:], ends.seconds[2:], strict=False)),)


def measured(models: dict[tuple[str, int, bool], Any]) -> dict[tuple[Any, ...], list[float]]:
    """Shortest times of every case."""
    cases: dict[tuple[Any, ...], Callable[[], tuple[float, ...]]] = {}
    for (method, depth, checkpointing), model in models.items():
        cases["passes", method, depth, checkpointing] = partial(passes, model)
        if checkpointing:
            continue
        if depth == SINGLE:
            for times in (1, 5):
                cases["trainer", method, depth, times] = partial(of_trainer, model, times)
        trained = [p for p in model.parameters() if p.requires_grad]
        cases["modules", method, depth] = partial(of_modules, model)
        cases["step", method, depth] = partial(of_step, torch.optim.AdamW(trained, fused=True))
        cases["clip", method, depth] = partial(of_clipping, model)
    best: dict[tuple[Any, ...], list[float]] = {}
    for _ in range(ROUNDS):
        for key, case in cases.items():
            for _ in range(1 if key[0] == "trainer" else 4):
                passes(models[key[1], key[2], False])  # gradients are there, and caches are warm
                found = case()
                best[key] = [min(p) for p in zip(best.get(key, found), found, strict=True)]
    return best


def causes(models: dict[tuple[str, int, bool], Any]) -> list[Cause]:
    best = measured(models)
    layers = DEEP - SHALLOW

    def slope(kind: str, method: str, *rest: Any, part: int = 0) -> float:
        """Seconds of a layer."""
        deep, shallow = (best[kind, method, depth, *rest][part] for depth in (DEEP, SHALLOW))
        return (deep - shallow) / layers

    def per_layer(method: str, count: Callable[[Any], int]) -> float:
        deep, shallow = (count(models[method, depth, False]) for depth in (DEEP, SHALLOW))
        return (deep - shallow) / layers

    def operations(method: str, *, checkpointing: bool) -> dict[str, float]:
        counts = host_time.operations(DEEP, method, checkpointing=checkpointing)
        counts.subtract(host_time.operations(SHALLOW, method, checkpointing=checkpointing))
        return {phase: count / layers for phase, count in counts.items()}

    plain = operations("full", checkpointing=False)
    unit = slope("passes", "full", False) / plain["forward"]
    found = [Cause(name="the unit, microseconds in this run", per="operation", units=unit * 1e6)]

    for method in host_time.METHODS:

        def add(name: str, per: str, seconds: float, *, of: str = method) -> None:
            found.append(Cause(name=f"{of}: {name}", per=per, units=round(seconds / unit, 3)))

        count, again = (operations(method, checkpointing=kept) for kept in (False, True))
        forward, backward = (slope("passes", method, False, part=part) for part in (0, 1))
        add("forward pass", "operation", forward / count["forward"])
        add("backward pass", "operation", backward / count["backward"])
        more = sum(slope("passes", method, True, part=part) for part in (0, 1)) - forward - backward
        add("recomputed", "operation", more / again["recompute"])
        modules = per_layer(method, lambda model: len(list(model.modules())))
        add("train()", "module", slope("modules", method) / modules)
        add("floating_point_ops", "module", slope("modules", method, part=1) / modules)
        tensors = per_layer(method, lambda m: sum(p.requires_grad for p in m.parameters()))
        add("clipping, its Python", "trained tensor", slope("clip", method) / tensors)
        add("zero_grad", "trained tensor", slope("clip", method, part=1) / tensors)
        add("fused AdamW", "trained tensor", slope("step", method) / tensors)
        once, often = (best["trainer", method, SINGLE, times][0] for times in (1, 5))
        micro = (often - once) / 4
        of_all = sum(best["passes", method, SINGLE, False]) + sum(best["modules", method, SINGLE])
        add("the Trainer beside passes and modules", "micro-step", micro - of_all)
        add("the Trainer, a model of one layer", "optimizer step", once - micro)
    return found


def markdown(found: list[Cause]) -> str:
    lines = ["| cause | per | units |", "|---|---|---:|"]
    return "\n".join([*lines, *(f"| {c.name} | {c.per} | {c.units:.2f} |" for c in found)])


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    gc.disable()
    models = {
        (method, depth, kept): host_time.model_of(depth, method, checkpointing=kept)
        for method in host_time.METHODS
        for depth in (SINGLE, SHALLOW, DEEP)
        for kept in (False, True)
    }
    found = causes(models)
    print(markdown(found))
    (STUDY / "causes.json").write_text(json.dumps([asdict(c) for c in found], indent=1) + "\n")
    write_sections(STUDY / "README.md", {"causes": markdown(found)})


if __name__ == "__main__":
    main()
