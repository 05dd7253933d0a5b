"""What a prediction costs: whole commands in cold processes, one configuration more, memory.

Run on an idle machine: python -m validation.timing.speed [--repeats 3] [COMMAND ...]

A command finds no traces but those of the command that it follows. Its seconds are the best of the repeats:
wall, and the CPU time (user and system) of all its processes, which another load disturbs less. Memory is the
largest single process's peak. Results of one machine are in studies/speed/.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.space.config import METHODS
from autotune.store import trace_cache
from validation.timing.commands import environment

if TYPE_CHECKING:
    from autotune.space.config import TrainConfig
    from autotune.worker.client.forkserver import ForkServer

MODEL = "meta-llama/Llama-3.1-8B"
CARD = "rtx-4090"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command and what it may take on two idle cores."""

    arguments: tuple[str, ...]
    target_seconds: float
    after: str = ""
    """Name of the command that it follows, whose traces it finds; empty: it finds none."""
    model_type: str = ""
    """Transformers' name of a family of models, of which it finds the default configuration in MADE."""


MADE = "./model"
"""Folder with a configuration that is made."""
_ESTIMATE = ("estimate", "--model", MODEL, "--gpu", CARD, "--method", "qlora")
_FIND = ("find", "--model", MODEL)
_MODELS = Path(__file__).parent / "models"
"""The config.json of models that are not in the catalogue, of the size that their makers say."""
_SEEN = ("--gpu", CARD, "--images", "1", "--image-size", "1024x768", "--seq-len", "2048")
_OF_T5 = ("--model", "google-t5/t5-base", "--gpu", "rtx-3060-12gb", "--effective-batch", "64")

COMMANDS = {
    "help": Command(arguments=("--help",), target_seconds=0.25),
    "estimate": Command(arguments=_ESTIMATE, target_seconds=4.0),
    "estimate again": Command(arguments=_ESTIMATE, target_seconds=0.8, after="estimate"),
    "find": Command(arguments=(*_FIND, "--gpu", CARD), target_seconds=8.0),
    "again": Command(arguments=(*_FIND, "--gpu", CARD), target_seconds=1.5, after="find"),
    "other budget": Command(
        arguments=(*_FIND, "--gpu-mem", "20GB"), target_seconds=1.5, after="find"
    ),
    "other card": Command(
        arguments=(*_FIND, "--gpu", "rtx-3090"), target_seconds=1.5, after="find"
    ),
    "everything": Command(
        arguments=(*_FIND, "--gpu", CARD, "--space", "everything"), target_seconds=20.0
    ),
    "gemma 3n": Command(
        arguments=("find", "--model", MADE, "--gpu", CARD),
        model_type="gemma3n_text",
        target_seconds=15.0,
    ),
    "gemma 4": Command(
        arguments=("find", "--model", MADE, "--gpu", CARD),
        model_type="gemma4_text",
        target_seconds=15.0,
    ),
    "grpo": Command(
        arguments=(*_FIND, "--gpu", CARD, "--task", "grpo", "--method", "lora"), target_seconds=15.0
    ),
    "t5": Command(arguments=("find", *_OF_T5), target_seconds=15.0),
    "dpo": Command(
        arguments=(*_FIND, "--gpu", CARD, "--task", "dpo", "--method", "lora"), target_seconds=15.0
    ),
    "qwen2.5-vl-7b": Command(
        arguments=("find", "--model", str(_MODELS / "qwen2.5-vl-7b.json"), *_SEEN),
        target_seconds=15.0,
    ),
    "llava-1.5-7b": Command(
        arguments=("find", "--model", str(_MODELS / "llava-1.5-7b.json"), *_SEEN),
        target_seconds=15.0,
    ),
}
TARGET_CONFIG_SECONDS = 1e-3

YARDSTICK = """
import json

class Pair:
    __slots__ = ("first", "second")

    def __init__(self, first, second):
        self.first, self.second = first, second

for _ in range(3):
    pairs = [Pair(number, number * 7919 % 10007) for number in range(60_000)]
    pairs.sort(key=lambda pair: (pair.second, pair.first))
    groups = {}
    for pair in pairs:
        groups.setdefault(pair.second % 997, []).append([pair.first, str(pair.second)])
    json.loads(json.dumps(groups))
"""
"""Program whose CPU time tells how fast a machine runs Python: objects, dictionaries, sorting, text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    wall_seconds: float
    cpu_seconds: float
    """User and system, all the command's processes."""
    peak_bytes: int
    """Resident, of its largest process."""


def cost_of(arguments: Sequence[str], *, traces: Path | None = None, model_type: str = "") -> Cost:
    """Run `autotune` once, in an empty folder and with no traces kept but those of that folder.

    `model_type`: of the configuration in the folder MADE, if there is to be one.

    Linux counts a parent's memory in a process that it has just begun: a small process between counts.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as between:
        config = config_of(model_type) if model_type else ""
        return between.submit(_child_cost, arguments, traces, config).result()


def config_of(model_type: str) -> str:
    """Return the default configuration of a family of models, as JSON."""
    from transformers import AutoConfig

    text: str = AutoConfig.for_model(model_type).to_json_string(use_diff=False)
    return text


def make_model(config: str, folder: Path) -> None:
    """Write a configuration into the folder MADE of another one."""
    place = folder / MADE
    place.mkdir()
    (place / "config.json").write_text(config, encoding="utf-8")


def _child_cost(arguments: Sequence[str], traces: Path | None, config: str) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        if config:
            make_model(config, Path(folder))
        started = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, "-m", "autotune", *arguments],
            cwd=folder,
            env={**environment(), trace_cache.VARIABLE: str(traces or folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        wall_seconds = time.perf_counter() - started
    if ran.returncode:
        raise RuntimeError(f"autotune {' '.join(arguments)}: {ran.stderr.decode(errors='replace')}")
    # Counts the processes that it waited for, too.
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(
        wall_seconds=wall_seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
    )


def yardstick_seconds(repeats: int = 3) -> float:
    """Mean CPU time of YARDSTICK in processes of its own, on this machine and beside what runs there now."""
    return statistics.fmean(_cpu_seconds_of_yardstick() for _ in range(repeats))


def _cpu_seconds_of_yardstick() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-I", "-c", YARDSTICK], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def best_of(command: Command, repeats: int) -> Cost:
    """Best times and largest memory of some runs."""
    costs = [_cost_after(command) for _ in range(repeats)]
    return Cost(
        wall_seconds=min(cost.wall_seconds for cost in costs),
        cpu_seconds=min(cost.cpu_seconds for cost in costs),
        peak_bytes=max(cost.peak_bytes for cost in costs),
    )


def _cost_after(command: Command) -> Cost:
    """Run a command once, behind the one that it follows."""
    with tempfile.TemporaryDirectory() as folder:
        if command.after:
            cost_of(COMMANDS[command.after].arguments, traces=Path(folder))
        return cost_of(command.arguments, traces=Path(folder), model_type=command.model_type)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pricing:
    """CPU time per configuration of the default space, once the traces exist."""

    num_configs: int
    config_seconds: float
    """Enumerated, checked against the rules, bounded, timed and ranked."""
    replay_seconds: float
    """A full estimate."""


def pricing(
    cache: trace_cache.TraceCache | None = None,
    *,
    methods: tuple[str, ...] = METHODS,
    server: ForkServer | None = None,
    num_replays: int = 20,
) -> Pricing:
    """Trace what the default space needs, unless the cache has it; then price all of it.

    `server`: whose forks trace.
    """
    from autotune.catalogue.gpus import find_gpu
    from autotune.catalogue.models import resolve
    from autotune.predict.estimator import Estimator
    from autotune.predict.tracing import trace_all
    from autotune.records.estimate import TraceSpec
    from autotune.search.candidates import Candidates
    from autotune.space import space_file
    from autotune.space.config import Workload
    from autotune.space.defaults import default_base
    from autotune.space.enumeration import enumerate_configs

    model, gpu = resolve(MODEL), find_gpu(CARD)
    workload = Workload(model=MODEL, memory_budget_bytes=gpu.capacity_bytes, methods=methods)
    space = space_file.load("default")

    def configs() -> list[TrainConfig]:
        return enumerate_configs(
            space, workload, num_layers=32, compute_capability=gpu.compute_capability
        ).configs

    specs = {TraceSpec.of(config) for config in configs()}
    length = workload.sequence_length
    traces = trace_all(model, workload.task, length, gpu, specs, server=server, cache=cache)
    estimator = Estimator(traces, gpu, memory_budget_bytes=workload.memory_budget_bytes)
    started = time.process_time()
    points = configs()
    base = default_base(workload, gpu, model)
    candidates = Candidates(estimator, points, base)
    for config in points:
        candidates.class_of(config)
    config_seconds = (time.process_time() - started) / len(points)
    some = points[:: len(points) // num_replays] if num_replays else []
    started = time.process_time()
    for config in some:
        estimator.estimate(config)
    return Pricing(
        num_configs=len(points),
        config_seconds=config_seconds,
        replay_seconds=(time.process_time() - started) / max(len(some), 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "commands", nargs="*", metavar="COMMAND", help=f"{', '.join(COMMANDS)} [all]"
    )
    asked = parser.parse_args()
    repeats = asked.repeats
    print(
        f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}; "
        f"the yardstick takes {yardstick_seconds():.2f} s\n"
    )
    print("| command | target | wall | CPU | largest process |\n|---|---:|---:|---:|---:|")
    for command in [COMMANDS[name] for name in asked.commands] or COMMANDS.values():
        cost = best_of(command, repeats)
        after = f", after `{command.after}`" * bool(command.after)
        after += f" (`{command.model_type}`)" * bool(command.model_type)
        print(
            f"| `autotune {' '.join(command.arguments)}`{after} | {command.target_seconds:g} s "
            f"| {cost.wall_seconds:.2f} s | {cost.cpu_seconds:.2f} s "
            f"| {cost.peak_bytes / 2**20:.0f} MiB |"
        )
    if asked.commands:
        return
    priced = pricing()
    print(
        f"\n{priced.num_configs:,} configurations: {priced.config_seconds * 1e3:.3f} ms each "
        f"(target {TARGET_CONFIG_SECONDS * 1e3:g} ms); "
        f"a full replay takes {priced.replay_seconds * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
