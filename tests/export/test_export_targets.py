"""Names of a version that is named (autotune export --target), and what the data says of versions."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import answers
import pytest
import yaml
from test_export_command import Export, run, save

from autotune import export
from autotune.errors import ConfigError
from autotune.export import targets, training_args, trl_config
from autotune.space.config import TrainConfig, Workload
from autotune.store import database

__all__ = ["run"]

STRIDED = dataclasses.replace(
    answers.ADAPTER, batching="grouped", activation_checkpointing=2, activation_offloading=True
)
TARGET_TAKERS = ("training-args", "training-args-yaml", "training-args-python", "sft")


def arguments_for(version: str, config: TrainConfig = STRIDED) -> dict[str, object]:
    with targets.named(targets.read([f"transformers=={version}"])):
        return training_args.known_arguments(answers.WORKLOAD, config)


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("5.0.0", {"use_reentrant": False}),
        ("5.16", {"use_reentrant": False, "every_n_layers": 2}),
        ("5.22.2", {"use_reentrant": False, "every_n_layers": 2, "offload": True}),
    ],
)
def test_checkpointing_is_called_as_the_version_calls_it(
    version: str, options: dict[str, object]
) -> None:
    written = arguments_for(version)
    assert written["gradient_checkpointing"] is True
    assert written["gradient_checkpointing_kwargs"] == options
    assert "activation_checkpointing" not in written


def test_the_version_of_the_rename() -> None:
    assert "activation_checkpointing" in arguments_for("5.23.0")
    assert arguments_for("5.1.0")["group_by_length"] is True
    assert arguments_for("5.2.0")["train_sampling_strategy"] == "group_by_length"


def test_names_are_the_installed_ones_again_afterwards() -> None:
    before = training_args.known_arguments(answers.WORKLOAD, STRIDED)
    arguments_for("5.0.0")
    assert training_args.known_arguments(answers.WORKLOAD, STRIDED) == before


def test_of_versions_that_are_not_known_the_newest_below_stands_in() -> None:
    (between,) = targets.read(["transformers==5.1.7"])
    assert between.release == "5.1.0"
    assert "5.1.7" in between.note
    assert "5.1.0" in between.note
    (newer,) = targets.read(["trl==99.1"])
    assert newer.release == targets.newest("trl")
    assert newer.note
    assert targets.read(["transformers==5.0"])[0].note == ""


def test_what_a_version_does_not_have_is_in_the_file_and_on_the_terminal(run: Export) -> None:
    config = dataclasses.replace(STRIDED, optimizer="stable_adamw", batching="padded")
    save(database.DEFAULT_URL, "strided", config)
    code, out, err = run(
        *("strided", "--format", "training-args-yaml", "--out", "-"),
        *("--target", "transformers==4.46.1"),
    )
    assert code == 0
    top = " ".join(line for line in out.splitlines() if line.startswith("#"))
    for place in (top, " ".join(err.split())):
        for name in (
            "optim=stable_adamw",
            "gradient_checkpointing_kwargs.every_n_layers",
            "gradient_checkpointing_kwargs.offload",
        ):
            assert f"{name}: unknown to transformers 4.46.1" in place
    assert "TrainingArguments for transformers 4.46.1, written by" in top
    values = yaml.safe_load(out)
    assert "optim" not in values
    assert values["gradient_checkpointing_kwargs"] == {"use_reentrant": False}


def test_what_the_user_set_and_the_version_does_not_have_is_named() -> None:
    extra = json.dumps({"project": "mine", "seed": 7})
    workload = dataclasses.replace(answers.WORKLOAD, extra_arguments=extra)
    with targets.named(targets.read(["transformers==4.56.0", "trl==1.10.0"])):
        for name in TARGET_TAKERS:
            words = "; ".join(map(str, export.unsaid(export.ALL[name], workload, STRIDED)))
            assert re.search(r"\bproject: unknown to (transformers 4.56.0|trl 1.10.0)", words)
            text = text_of(name, workload)
            uncommented = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
            assert "seed" in uncommented
            assert "project" not in uncommented
            if name != "training-args":
                assert "project: unknown to" in text


def text_of(name: str, workload: Workload) -> str:
    result = {"evidence": "predicted"}
    return export.ALL[name].write(workload=workload, config=STRIDED, result=result)


@pytest.mark.parametrize(
    ("version", "here", "not_here"),
    [
        ("0.12.0", {"max_seq_length", "torch_dtype"}, {"max_length", "dtype", "packing_strategy"}),
        ("0.19.0", {"max_length", "torch_dtype", "packing_strategy"}, {"max_seq_length", "dtype"}),
        ("1.10.0", {"max_length", "dtype", "packing_strategy"}, {"max_seq_length", "torch_dtype"}),
    ],
)
def test_sft_says_lengths_and_dtypes_as_the_version_does(
    version: str, here: set[str], not_here: set[str]
) -> None:
    with targets.named(targets.read([f"trl=={version}", "transformers==4.57.1"])):
        text = text_of("sft", answers.WORKLOAD)
    assert f"for transformers 4.57.1 and trl {version}, written by" in text
    keys = set(yaml.safe_load(text))
    assert here <= keys
    assert not not_here & keys
    if version == "0.12.0":
        assert f"packing_strategy: unknown to trl {version}" in text


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [
        (["--target", "transformers"], ["names no version", "transformers==5.0.0"]),
        (["--target", "transformers==5.0.0rc1"], ["names no version"]),
        (["--target", "tranformers==5.0.0"], ["knows no versions of", '"transformers"']),
        (["--target", "transformers==4.20.0"], ["not known", "4.45.0 to 5."]),
        (["--target", "trl==1.10.0"], ["has no effect on training-args"]),
        (
            ["--target", "transformers==5.0.0", "--target", "transformers==5.1.0"],
            ["names a library twice"],
        ),
        (
            ["--format", "axolotl", "--target", "transformers==5.0.0"],
            ["The format axolotl cannot", *TARGET_TAKERS],
        ),
    ],
)
def test_what_cannot_be_named_is_explained(
    run: Export, chosen: list[str], parts: list[str]
) -> None:
    code, out, err = run("full", "--format", "training-args", "--out", "x", *chosen)
    assert (code, out) == (2, "")
    for part in parts:
        assert part in " ".join(err.split())
    assert not Path("x").exists()


def test_the_version_that_is_between_is_said(run: Export) -> None:
    code, _, err = run(
        *("full", "--format", "training-args", "--out", "x.json"),
        *("--target", "transformers==5.1.7"),
    )
    assert code == 0
    assert "note: transformers 5.1.7: the names are those of 5.1.0" in " ".join(err.split())


def test_trl_that_is_not_here_must_be_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = targets.read(["transformers==5.0.0"])
    with pytest.raises(ConfigError, match="trl too, which is not installed"):
        export.check_targets([trl_config.EXPORTERS[0]], chosen)
    export.check_targets([trl_config.EXPORTERS[0]], (*chosen, *targets.read(["trl==1.10.0"])))
