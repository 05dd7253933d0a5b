"""Libraries that some settings need beyond those autotune depends on, and whether they are here.

A search leaves out what is not installed and says so; an estimate prices it all the same, where its
step can be traced without the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.catalogue.installed import is_installed
from autotune.space.checkpoint_plans import plan_offloads
from autotune.space.compilation import why_not_predicted
from autotune.space.config import METHODS, TrainConfig
from autotune.space.knobs import KNOBS, REQUIRED, Knob
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.space.search_space import SearchSpace

VLLM = "trl[vllm]"
"""The package that brings vLLM in a version that TRL takes, as pip names it."""


class Reason(StrEnum):
    """Why a search leaves values out."""

    NOT_PREDICTED = "not predicted"
    NOT_INSTALLED = "not installed"
    NOT_COMPILED = "not compiled"
    NOT_TRACED = "not traced"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Values of a space that a search leaves out for one reason; as text `words (details)`."""

    words: str
    """The values, for people."""
    reason: Reason
    details: str
    """The reason in more detail, for people."""

    def __str__(self) -> str:
        return f"{self.words} ({self.details})"


def of_config(config: TrainConfig) -> tuple[str, ...]:
    """Return what a configuration needs that is not installed, for people."""
    lacks = tuple(
        f"{knob.words(value)} ({reason})"
        for knob in KNOBS.values()
        if (reason := _lacks(knob, value := getattr(config, knob.name)))
    )
    return (*lacks, *of_vllm(config))


def of_vllm(config: TrainConfig) -> tuple[str, ...]:
    """Return that vLLM writes where it is not installed: a search predicts that all the same."""
    lacks = config.writes_with_vllm and not is_installed("vllm")
    return (f"vLLM (needs: pip install {VLLM})",) if lacks else ()


ON_CPUS = ("ddp", "fsdp2", "fsdp2-no-reshard", "hsdp", "tp", "cp", "zero1", "zero2", "zero3")
"""Ways to share a run that processes on CPUs run, too, over gloo. Offloading pins host memory for a card."""


def of_cuda(config: TrainConfig) -> tuple[str, ...]:
    """Return the parts of a configuration that a probe on the CPU cannot run, for people; empty if none."""
    precision = PRECISIONS[config.precision]
    reasons = (
        (
            precision.grad_scaler or precision.tf32,
            f"precision {config.precision} needs a CUDA device",
        ),
        (precision.fp8, "fp8 runs under CUDA's autocast, and needs a CUDA device"),
        (
            config.activation_offloading or plan_offloads(config.checkpoint_plan),
            "activation offloading needs a CUDA device",
        ),
        (OPTIMIZERS[config.optimizer].only_cuda, f"{config.optimizer} needs a CUDA device"),
        (config.expandable_segments, "expandable segments need CUDA's allocator"),
        (config.liger, "Liger's kernels need a CUDA device"),
        (
            config.parallelism not in ("none", *ON_CPUS),
            f"{config.parallelism} needs CUDA devices",
        ),
        (
            config.parallelism not in ("none", "ddp") and config.is_compiled,
            f"torch.compile of what {config.parallelism} shares out needs CUDA devices",
        ),
        # torch 2.13 nn/attention/flex_attention.py, _validate_device.
        (
            config.attention == "flex_attention",
            "flex_attention's backward pass needs a CUDA device",
        ),
    )
    return tuple(reason for applies, reason in reasons if applies)


def of_probe(config: TrainConfig, backend: str) -> tuple[str, ...]:
    """Return the parts of a configuration that no probe on that backend can run, for people."""
    if PARALLELISMS[config.parallelism].schedules:
        return (f"{config.parallelism} is predicted alone: no trainer runs it",)
    if PARALLELISMS[config.parallelism].deals_layers:
        return (f"{config.parallelism} is predicted alone: a probe has one GPU in each process",)
    if config.writes_with_vllm:
        # It loads a model's files by name; a probe has a model of random weights, and no files.
        reason = "vLLM writes completions of a model from its files, and a probe has none"
        return of_vllm(config) or (f"{reason}: take the prediction",)
    lacks: tuple[str, ...] = ()
    if PARALLELISMS[config.parallelism].is_deepspeed and not is_installed("deepspeed"):
        lacks = (f"{config.parallelism} is run by DeepSpeed (needs: pip install deepspeed)",)
    return lacks + (of_cuda(config) if backend == "cpu" else ())


def unpredicted(config: TrainConfig) -> tuple[str, ...]:
    """Return the settings that an estimate leaves aside, for people."""
    is_predicted = config.is_compiled and not why_not_predicted(config)
    return tuple(
        knob.words(value)
        for knob in KNOBS.values()
        if (value := getattr(config, knob.name)) in knob.unpredicted
        and not (is_predicted and knob.name == "torch_compile")
    )


def predictable(
    space: SearchSpace, methods: Collection[str] = METHODS, *, has: TrainConfig | None = None
) -> tuple[SearchSpace, tuple[LeftOut, ...]]:
    """Return the space without values that are not installed or not predicted, and which of these were.

    Only those of `methods` count among them. A setting that has nothing else left keeps its default; a
    section that must name it goes. What `has` needs is taken for installed: it trains somewhere already.
    """
    left_out: dict[tuple[Reason, str], dict[str, None]] = {}
    sections = []
    for section in space.methods:
        if section.method not in methods:
            continue
        domains: dict[str, tuple[Any, ...]] = dict(section.domains)
        for name, values in section.domains.items():
            knob = KNOBS[name]
            why = {
                value: reason
                for value in values
                if (reason := _why_left_out(knob, value))
                and not (has is not None and value == getattr(has, name))
            }
            if why:
                left = tuple(value for value in values if value not in why)
                default = () if knob.default is REQUIRED else (knob.default,)
                domains[name] = left or default
            for value, reason in why.items():
                left_out.setdefault(reason, {})[knob.words(value)] = None
        if all(domains.values()):
            sections.append(dataclasses.replace(section, domains=domains))
    said = tuple(LeftOut(", ".join(words), *reason) for reason, words in left_out.items())
    return dataclasses.replace(space, methods=tuple(sections)), said


def _why_left_out(knob: Knob, value: object) -> tuple[Reason, str] | None:
    """Why a search leaves the value out, and details; None where it does not."""
    if value in knob.unpredicted:
        return Reason.NOT_PREDICTED, Reason.NOT_PREDICTED.value
    lacks = _lacks(knob, value)
    return (Reason.NOT_INSTALLED, lacks) if lacks else None


def _lacks(knob: Knob, value: object) -> str:
    library = knob.needs.get(value)
    return "" if library is None or is_installed(library) else f"needs: pip install {library}"
