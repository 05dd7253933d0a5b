"""What a training step costs the host beside a plain operation, where no card makes it wait.

    python -m tools.no_card --gpu H200 -- python -m validation.timing.host_causes      (six minutes, one core)

PyTorch's CUDA build launches on a card that computes nothing (tools/no_card): a step takes what the host
takes. The probe's own Trainer runs models of next to no size, Llama's layers and GPT-2's, at two depths; the
differences give what an operation, a module, a trained tensor or a recomputed region costs. Processor time,
as nothing waits for anything: medians of steps, the lowest of a few rounds.

Every figure is a multiple of the time of one operation of a float32 forward pass (the unit), which `autotune
calibrate` measures of any machine: autotune/speed/host.py takes them times the usual host's. A launch costs
a real driver some microseconds more than here, whatever it launches. Writes studies/host-time/causes.json
and the table of its README.md. Not measured: GradScaler, DDP, other tasks than causal-lm.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, TrainerCallback, logging

from autotune.memory.traces import Trace
from autotune.predict.launched_kernels import is_triton
from autotune.records.estimate import TraceSpec
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.speed.roofline import kind_of
from autotune.worker.build.real_model import build
from autotune.worker.calibrate.host import config_of
from autotune.worker.probe.training import build_trainer, train
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation.published.tables import write_sections

STUDY = Path(__file__).parents[2] / "studies" / "host-time"
SHALLOW, DEEP = 2, 12
ROUNDS, STEPS, WARM_UP_STEPS = 3, 20, 6
ACCUMULATION = 2
LORA = {"lora_rank": 8, "lora_targets": "all-linear"}

METHODS: dict[str, dict[str, Any]] = {
    "float32": {"method": "full", "precision": "fp32"},
    "bfloat16": {"method": "full", "precision": "bf16-true"},
    "autocast": {"method": "full", "precision": "bf16-mixed"},
    "LoRA": {"method": "lora", "precision": "bf16-autocast", **LORA},
    "LoRA, bfloat16": {"method": "lora", "precision": "bf16-true", **LORA},
    "QLoRA": {
        "method": "qlora",
        "precision": "bf16-autocast",
        "quantization": "nf4-double",
        **LORA,
    },
}
UPDATES: dict[str, dict[str, Any]] = {
    "in the backward pass": {**METHODS["bfloat16"], "update_in_backward": True},
    "bitsandbytes": {**METHODS["bfloat16"], "optimizer": "adamw_bnb_8bit"},
}
LIGER = {"Liger": {**METHODS["bfloat16"], "liger": True}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration of one family of models."""

    name: str
    gpt2: bool = False
    recomputes: str = ""
    """`hooks` or `reentrant`: how torch.utils.checkpoint does; empty: nothing is."""

    def config(self) -> TrainConfig:
        settings = {"optimizer": "adamw_torch_fused", **(METHODS | UPDATES | LIGER)[self.name]}
        in_backward = settings.get("update_in_backward", False)
        return TrainConfig(
            micro_batch_size=2,
            gradient_accumulation_steps=1 if in_backward else ACCUMULATION,
            sequence_length=16,
            activation_checkpointing=int(bool(self.recomputes)),
            **settings,
        )

    def model_config(self, depth: int) -> Any:
        if not self.gpt2:
            return config_of(depth)
        return GPT2Config(
            n_layer=depth,
            n_embd=64,
            n_head=4,
            vocab_size=128,
            n_positions=64,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            use_cache=False,
        )


RECOMPUTED = [(name, gpt2) for name in ("bfloat16", "LoRA") for gpt2 in (False, True)]
RECOMPUTED += [("autocast", False), ("LoRA, bfloat16", False)]
CASES = [
    *(Case(name=name) for name in METHODS | UPDATES),
    *(Case(name=name, gpt2=True) for name in ("bfloat16", "LoRA")),
    *(
        Case(name=name, gpt2=gpt2, recomputes=how)
        for how in ("hooks", "reentrant")
        for name, gpt2 in RECOMPUTED
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One cause of host time, in units of a plain operation."""

    name: str
    per: str
    units: float


class _Ends(TrainerCallback):
    """Notes when optimizer steps begin and end, and stops after STEPS."""

    def __init__(self, note: Callable[[str, float], None]) -> None:
        self._note, self._num_steps, self._began = note, 0, 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._note("step", time.process_time() - self._began)

    def on_step_end(self, *moment: Any, **_: Any) -> None:
        _, _, control = moment
        self._note("end", time.process_time())
        self._num_steps += 1
        control.should_training_stop = self._num_steps >= STEPS


def measured(case: Case, depth: int) -> dict[str, float]:
    """Median seconds of each part of a step, and how many modules and trained tensors the model has."""
    config, model_config = case.config(), case.model_config(depth)
    spec = ProbeSpec(
        task="causal-lm", backend="cuda", memory_budget_bytes=10**10, max_seconds=60, max_steps=1000
    )
    seen: dict[str, list[float]] = defaultdict(list)

    def timed(owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = call(*args, **kwargs)
            seen[part].append(time.process_time() - start)
            return result

        setattr(owner, name, wrapper)

    def micro_step(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        start = time.process_time()
        loss = run()
        seen["micro-step"].append(time.process_time() - start)
        seen["micro-step ended"].append(time.process_time())
        return loss

    with tempfile.TemporaryDirectory() as folder:
        model = build(model_config, "causal-lm", config, torch.device("cuda"))
        trainer = build_trainer(model, model_config, config, spec, folder)
        if case.recomputes == "reentrant":
            trainer.args.activation_checkpointing_kwargs = {"use_reentrant": True}
            trainer.model.enable_input_require_grads()
        trainer.micro_step = micro_step
        trainer.add_callback(_Ends(lambda part, moment: seen[part].append(moment)))
        for owner, name, part in (
            (trainer, "compute_loss", "forward"),
            (trainer, "floating_point_ops", "counting"),
            (trainer.accelerator, "clip_grad_norm_", "clipping"),
            (trainer.model, "train", "train()"),
            (trainer.model, "zero_grad", "zero_grad"),
        ):
            timed(owner, name, part)
        train(trainer)
    ends, accumulation = seen.pop("end"), config.gradient_accumulation_steps
    last = seen.pop("micro-step ended")[accumulation - 1 :: accumulation]
    seen["update"] = [end - began for end, began in zip(ends, last, strict=True)]
    seen["whole"] = [0.0, *(after - before for before, after in itertools.pairwise(ends))]
    found = {
        part: statistics.median(moments[len(moments) * WARM_UP_STEPS // STEPS :])
        for part, moments in seen.items()
    }
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    return {**found, "modules": len(list(trainer.model.modules())), "tensors": len(trained)}


def operations(case: Case, depth: int) -> dict[str, float]:
    """Launches of a micro-step by phase, how many of them unpack 4-bit weights, and how many are Triton's."""
    config = case.config()
    answer = trace_step(
        case.model_config(depth),
        "causal-lm",
        TraceSpec.of(config),
        sequence_length=config.sequence_length,
        device=Device(compute_capability=(9, 0), cublas_workspace_bytes=0),
        whole=True,
    )
    counts: dict[str, float] = defaultdict(float)
    for launch in Trace(answer).launches(config.micro_batch_size, 8):
        counts[launch.kernel.phase] += launch.count
        counts["unpacked"] += launch.count * (kind_of(launch.kernel.name) == "dequantize")
        counts["Triton"] += launch.count * is_triton(launch.kernel)
    return counts


def run() -> tuple[dict[tuple[Case, int], dict[str, float]], dict[Case, dict[str, float]]]:
    """Times of all cases at both depths, and what a layer launches, and the model beside its layers."""
    times: dict[tuple[Case, int], dict[str, float]] = {}
    counts = {}
    # Liger changes Transformers' classes for good.
    for cases in (CASES, [Case(name=name) for name in LIGER]):
        for case in cases:
            for depth in ROUNDS * [SHALLOW, DEEP]:
                found = measured(case, depth)
                known = times.get((case, depth), found)
                times[case, depth] = {part: min(known[part], found[part]) for part in found}
                gc.collect()
        for case in cases:
            shallow, deep = operations(case, SHALLOW), operations(case, DEEP)
            each = {key: (deep[key] - shallow[key]) / (DEEP - SHALLOW) for key in deep}
            beside = {f"{key} beside": shallow[key] - SHALLOW * each[key] for key in deep}
            counts[case] = each | beside
    return times, counts


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(value at 0, slope) of the straight line through points, by least squares."""
    x, y = np.array(list(points)).T
    slope, start = np.polyfit(x, y, 1)
    return float(start), float(slope)


class Causes:
    """Figures from the times of all cases."""

    def __init__(
        self,
        times: dict[tuple[Case, int], dict[str, float]],
        counts: dict[Case, dict[str, float]],
    ) -> None:
        self._times, self._counts = times, counts
        plain = Case(name="float32")
        self.unit_seconds = self.layer(plain, "forward") / counts[plain]["forward"]
        self.found = [
            Cause(name="the unit, microseconds", per="operation", units=self.unit_seconds * 1e6)
        ]

    def layer(self, case: Case, part: str) -> float:
        """What a layer adds to a part of a step."""
        deep, shallow = (self._times[case, depth][part] for depth in (DEEP, SHALLOW))
        return (deep - shallow) / (DEEP - SHALLOW)

    def fixed(self, case: Case, *parts: str) -> float:
        """Seconds of parts of a step of a model without layers."""
        return sum(self._times[case, DEEP][p] - DEEP * self.layer(case, p) for p in parts)

    def passes(self, case: Case) -> tuple[float, float]:
        """Seconds of a layer's forward pass, and of all else of a micro-step but train()."""
        forward = self.layer(case, "forward")
        return forward, self.layer(case, "micro-step") - forward - self.layer(case, "train()")

    def add(self, name: str, per: str, seconds: float) -> None:
        self.found.append(Cause(name=name, per=per, units=round(seconds / self.unit_seconds, 3)))

    def all(self) -> list[Cause]:
        self.of_operations()
        self.of_recomputation()
        self.of_the_trainer()
        self.of_updates()
        return self.found

    def of_operations(self) -> None:
        for case in CASES:
            if case.recomputes or case.name in {*UPDATES, "QLoRA"}:
                continue
            name = f"{'GPT-2, ' if case.gpt2 else ''}{case.name}"
            for phase, seconds in zip(("forward", "backward"), self.passes(case), strict=True):
                self.add(f"{name}: {phase} pass", "operation", seconds / self._counts[case][phase])
        lora, qlora = Case(name="LoRA"), Case(name="QLoRA")
        more = sum(self.passes(qlora)) - sum(self.passes(lora))
        for phase, seconds in zip(("forward", "backward"), self.passes(lora), strict=True):
            num_more = self._counts[qlora][phase] - self._counts[lora][phase]
            more -= num_more * seconds / self._counts[lora][phase]
        self.add("QLoRA: a weight unpacked", "unpacking", more / self._counts[qlora]["unpacked"])
        plain, liger = Case(name="bfloat16"), Case(name="Liger")
        more = sum(self.passes(liger))
        for phase, seconds in zip(("forward", "backward"), self.passes(plain), strict=True):
            more -= self._counts[liger][phase] * seconds / self._counts[plain][phase]
        self.add("Liger: a Triton kernel", "launch", more / self._counts[liger]["Triton"])

    def of_recomputation(self) -> None:
        for how in ("hooks", "reentrant"):
            points = []
            for name, gpt2 in RECOMPUTED:
                case, plain = Case(name=name, gpt2=gpt2, recomputes=how), Case(name=name, gpt2=gpt2)
                more = sum(self.passes(case)) - sum(self.passes(plain))
                points.append((self._counts[case]["recompute"], more))
            start, slope = line(points)
            self.add(f"recomputed, {how}: a region", "region", start)
            self.add(f"recomputed, {how}", "operation", slope)

    def of_the_trainer(self) -> None:
        full, lora = Case(name="bfloat16"), Case(name="LoRA")
        self.add("the Trainer beside all this", "micro-step", self.between())
        for part in ("train()", "counting"):
            self.add(part, "module", self.layer(lora, part) / self.layer(lora, "modules"))
        walked = [
            [self.layer(case, key) for key in ("modules", "tensors")] for case in (full, lora)
        ]
        for part in ("clipping", "zero_grad"):
            spent = [self.layer(case, part) for case in (full, lora)]
            per_module, per_tensor = np.linalg.solve(walked, spent)
            self.add(part, "module", per_module)
            self.add(part, "trained tensor", per_tensor)

    def between(self) -> float:
        """Seconds of a micro-step of a model without layers, beside what is launched."""
        full, model = Case(name="bfloat16"), "whole"
        of_steps = self.fixed(full, model) - self.fixed(full, "update")
        of_steps -= (ACCUMULATION - 1) * self.fixed(full, "counting")
        for phase, seconds in zip(("forward", "backward"), self.passes(full), strict=True):
            num_beside = self._counts[full][f"{phase} beside"]
            of_steps -= ACCUMULATION * num_beside * seconds / self._counts[full][phase]
        return of_steps / ACCUMULATION

    def of_updates(self) -> None:
        full = Case(name="bfloat16")
        tensors = self.layer(full, "tensors")
        fused = self.layer(full, "step") / tensors
        self.add("fused AdamW", "trained tensor", fused)
        self.add("clipping and AdamW", "optimizer step", self.fixed(full, "clipping", "step"))
        parts = ("clipping", "step", "zero_grad", "counting")
        rest = self.fixed(full, "update") - self.fixed(full, *parts)
        self.add("the Trainer beside", "optimizer step", rest)
        by_library = self.layer(Case(name="bitsandbytes"), "step") / tensors
        self.add("bitsandbytes, beside fused AdamW", "trained tensor", by_library - fused)
        in_backward = Case(name="in the backward pass")
        more = sum(self.passes(in_backward)) - sum(self.passes(full))
        self.add("updated in the backward pass", "trained tensor", more / tensors)


def markdown(found: list[Cause]) -> str:
    lines = ["| cause | per | units |", "|---|---|---:|"]
    return "\n".join([*lines, *(f"| {c.name} | {c.per} | {c.units:.2f} |" for c in found)])


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = Causes(*run()).all()
    print(markdown(found))
    (STUDY / "causes.json").write_text(json.dumps([asdict(c) for c in found], indent=1) + "\n")
    write_sections(STUDY / "README.md", {"causes": markdown(found)})


if __name__ == "__main__":
    main()
