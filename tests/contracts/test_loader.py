"""The loader of an exported train.py, timed with its own rows, collator and the Trainer's DataLoader."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from autotune.export import train_py
from autotune.export.samples.values import UnusableData
from autotune.records.loader_times import LoaderTime, LoaderTimes, settings_to_time
from autotune.space.config import TrainConfig, Workload
from autotune.worker.probe import loading

PADDED = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    sequence_length=64,
    precision="fp32",
    optimizer="adamw_torch",
    batching="padded",
)


def make_tokenizer(folder: Path) -> None:
    """One that knows a word."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "word": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[UNK]"
    ).save_pretrained(folder)


def loader_request(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = list(settings_to_time(2, has_cuda=False))
    program = train_py.write(
        workload=Workload(model="tiny", memory_budget_bytes=1),
        config=PADDED,
        result={"evidence": "measured"},
    )
    return {
        "program": program,
        "dataset": str(folder / "data.txt"),
        "tokenizer": str(folder),
        "backend": "cpu",
        "micro_step_seconds": 1e-9,
        "settings": settings,
        **changes,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    make_tokenizer(folder)
    (folder / "data.txt").write_text("word\n" * 50, encoding="utf-8")
    return folder


def test_a_loader_that_nothing_can_keep_up_with_is_timed_in_every_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MAX_SECONDS", 0.2)
    request = loader_request(folder)
    found = list(loading.time_loaders(request))
    assert [(f["num_workers"], f["prefetch_factor"]) for f in found] == [
        (0, None),
        (1, 2),
        (2, 2),
        (2, 4),
    ]
    assert all(f["batch_seconds"] > 0 for f in found)


def test_a_loader_that_keeps_up_is_the_last_that_is_timed(folder: Path) -> None:
    (found,) = loading.time_loaders(loader_request(folder, micro_step_seconds=1000.0))
    assert found["num_workers"] == 0


class SlowRows(torch.utils.data.Dataset[Any]):
    """Two fifths of a second for four: what a busy machine adds is little beside it."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.1)
        return {"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4)}


def test_a_batch_takes_what_its_rows_take_and_workers_share_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(loading, "MIN_BATCHES", 6)
    collator = transformers.default_data_collator
    monkeypatch.setattr(loading, "_rows", lambda *_: (SlowRows(), collator))
    times = tuple(
        LoaderTime(**found)
        for found in loading.time_loaders(loader_request(folder, micro_step_seconds=0.32))
    )
    assert 0.4 <= times[0].batch_seconds < 0.8
    assert 0.36 <= times[1].batch_seconds < 0.8
    # Two load a batch in half the time, which is less than the step's.
    assert len(times) == 3
    assert times[2].batch_seconds < 0.32
    assert LoaderTimes(micro_step_seconds=0.32, times=times).chosen == times[2]


def test_what_the_user_has_set_of_the_loader_is_timed_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    timed = loading._timed

    def watched(loader: Any, setting: dict[str, Any]) -> tuple[float, int]:
        sampler = loader.batch_sampler
        seen.append((sampler.drop_last, loader.num_workers, sampler.batch_size))
        return timed(loader, setting)

    monkeypatch.setattr(loading, "_timed", watched)
    workload = Workload(
        model="tiny", memory_budget_bytes=1, extra_arguments='{"dataloader_drop_last": true}'
    )
    program = train_py.write(workload=workload, config=PADDED, result={"evidence": "measured"})
    request = loader_request(folder, program=program, micro_step_seconds=1000.0)
    list(loading.time_loaders(request))
    assert seen == [(True, 0, 4)]


def test_a_dataset_that_cannot_be_read_is_said(folder: Path) -> None:
    request = loader_request(folder, dataset=str(folder / "nowhere.txt"))
    with pytest.raises(UnusableData, match=r"nowhere.txt: There is no such file"):
        list(loading.time_loaders(request))
