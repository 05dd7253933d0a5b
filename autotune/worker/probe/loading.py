"""Times the loader of an exported train.py: its own rows and collator, through the Trainer's loader.

The program's functions are used as they are, on the real file and the tokenizer's local files. What it
tokenises beforehand is not part of a batch's time, here as there. On CUDA a batch is there when it has
arrived on the device. Not yet run on a GPU: that.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from autotune.export.samples.values import UnusableData
from autotune.records.loader_times import LoaderTime
from autotune.worker.lengths import load_processor, load_tokenizer

MAX_SAMPLES = 5_000
"""Most samples of the dataset that are read. [judgement] A batch takes as long whichever samples it is made
of."""
MAX_BATCHES = 300
MIN_BATCHES = 60
"""Fewest batches of an epoch; a smaller dataset is repeated."""
MAX_SECONDS = 2.0
"""Longest time that one setting is timed for."""


class _NoModel(nn.Module):
    """A model that only tells the Trainer what a forward pass takes, for it drops everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        pixel_values: Any = None,
        input_features: Any = None,
        input_values: Any = None,
        labels: Any = None,
        start_positions: Any = None,
        end_positions: Any = None,
    ) -> Any:
        raise AssertionError("nothing is trained")


def time_loaders(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield fields of a LoaderTime for each of the settings, up to the first that keeps up.

    Raises UnusableData.
    """
    program = _program(request["program"])
    rows, collator = _rows(program, request)
    for setting in request["settings"]:
        with tempfile.TemporaryDirectory(prefix="autotune-loader-") as folder:
            arguments = _arguments(program.RECIPE, setting, folder, request["backend"])
            trainer = Trainer(
                model=_NoModel(), args=arguments, train_dataset=rows, data_collator=collator
            )
            batch_seconds, num_batches = _timed(trainer.get_train_dataloader(), setting)
        found = LoaderTime(**setting, batch_seconds=batch_seconds, num_batches=num_batches)
        yield {**setting, "batch_seconds": batch_seconds, "num_batches": num_batches}
        if found.keeps_up(request["micro_step_seconds"]):
            return


def _program(text: str) -> Any:
    """Make a module of the program that autotune.export.train_py has written."""
    program = types.ModuleType("train")
    sys.modules["train"] = program  # dataclasses look there for the names of types
    exec(compile(text, "train.py", "exec"), program.__dict__)
    return program


def _rows(program: Any, request: dict[str, Any]) -> tuple[Any, Any]:
    """Make what train.py makes of the dataset: (rows, collator).

    Raises UnusableData.
    """
    parser = argparse.ArgumentParser()
    program.add_data_options(parser)
    options = parser.parse_args(["--dataset", request["dataset"]])
    reads = program.RECIPE["reads"]
    if reads != "tokens":
        reader = load_processor(request["tokenizer"], reads)
    else:
        reader = load_tokenizer(request["tokenizer"])
        if reader.pad_token is None:
            reader.pad_token = reader.eos_token
    try:
        data = program.read_data(request["dataset"], options)
        data = dataclasses.replace(data, samples=data.samples[:MAX_SAMPLES])
        classes = program.classes_of(data) if program.RECIPE["has_classes"] else None
        rows = program.make_dataset(data, reader, classes, options, request["dataset"])
    except SystemExit as end:  # The program's way to say that it cannot read something.
        raise UnusableData(str(end.code)) from end
    micro_batch = program.RECIPE["training_arguments"]["per_device_train_batch_size"]
    num_repeats = -(-MIN_BATCHES * micro_batch // len(rows))
    if num_repeats > 1:
        rows = torch.utils.data.ConcatDataset([rows] * num_repeats)
    return rows, program.make_collator(reader, None)


def _arguments(
    recipe: dict[str, Any], setting: dict[str, Any], folder: str, backend: str
) -> TrainingArguments:
    kept = ("per_device_train_batch_size", "train_sampling_strategy")
    values = {
        name: value
        for name, value in recipe["training_arguments"].items()
        if name in kept or name.startswith("dataloader_")
    }
    values |= {
        "output_dir": folder,
        "use_cpu": backend == "cpu",
        "report_to": "none",
        "dataloader_num_workers": setting["num_workers"],
        "dataloader_prefetch_factor": setting["prefetch_factor"],
        "dataloader_pin_memory": bool(setting["pin_memory"]),
    }
    return TrainingArguments(**values)


def _timed(loader: Any, setting: dict[str, Any]) -> tuple[float, int]:
    """Time a loader once the batches that wait at the start are used up: (seconds per batch, how many)."""
    batches = iter(loader)
    num_waiting = setting["num_workers"] * (setting["prefetch_factor"] or 0)
    for _ in itertools.islice(batches, min(1 + num_waiting, MIN_BATCHES // 2)):
        pass
    _wait_for_device()
    began = time.perf_counter()
    num_batches = 0
    for num_batches, _ in enumerate(itertools.islice(batches, MAX_BATCHES), start=1):  # noqa: B007
        if time.perf_counter() - began > MAX_SECONDS:
            break
    _wait_for_device()
    return (time.perf_counter() - began) / num_batches, num_batches


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
