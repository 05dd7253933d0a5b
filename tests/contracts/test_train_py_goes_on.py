"""train.py where memory runs out: the next fallback, from the last checkpoint, with the same samples.

The budget is enforced on the CPU by the tracker of a probe, which raises torch's own exception.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import runpy
import signal
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from here import signals_put_back, workers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from autotune.export import train_py, unsloth_py
from autotune.memory.out_of_memory import says_out_of_memory
from autotune.space.config import TrainConfig, Workload
from autotune.space.cut_by_tokens import cut_by_tokens
from autotune.space.lengths import Lengths
from autotune.worker.probe.memory import CappedTracker

pytestmark = pytest.mark.slow

LENGTH = 64
WORDS = [f"w{number}" for number in range(60)]
ANSWER = TrainConfig(
    method="full",
    micro_batch_size=8,
    gradient_accumulation_steps=1,
    sequence_length=LENGTH,
    precision="fp32",
    optimizer="adamw_torch",
    batching="padded",
)
FALLBACKS = (
    dataclasses.replace(ANSWER, micro_batch_size=4, gradient_accumulation_steps=2),
    dataclasses.replace(
        ANSWER, micro_batch_size=1, gradient_accumulation_steps=8, activation_checkpointing=1
    ),
)
OF_ANOTHER_RUN = dataclasses.replace(ANSWER, micro_batch_size=1)
PLENTY_BYTES = 10**12
PREDICTED = {"evidence": "predicted"}
NUM_STEPS = 8

CAPPED = """
import gc, os, runpy, sys
from autotune.worker.probe.memory import CappedTracker

cap_bytes, checkpoint = int(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[3:]

class Shrinking(CappedTracker):
    def _record_allocation(self, *what):
        if os.path.exists(checkpoint):
            self._cap_bytes = cap_bytes
        return super()._record_allocation(*what)

gc.disable()
with Shrinking(10**12):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program that is short of memory once a checkpoint is there."""

STOPPED = """
import os, runpy, signal, sys
from transformers import Trainer

number, at_step, train = int(sys.argv[1]), int(sys.argv[2]), Trainer.training_step
sys.argv = sys.argv[3:]

def train_or_be_stopped(self, *given, **named):
    if self.state.global_step == at_step:
        os.kill(os.getpid(), number)
    return train(self, *given, **named)

Trainer.training_step = train_or_be_stopped
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program that is sent a signal in a step."""


class Peak(CappedTracker):
    peak_bytes = 0

    def _record_allocation(self, *what: Any) -> int:
        index = super()._record_allocation(*what)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return index


class Started(Exception):
    """Stands for the process that execve would start."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a dataset of samples of many lengths, and train.py."""
    folder = tmp_path_factory.mktemp("goes-on")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    words = ["[PAD]", "[UNK]", "[EOS]", *WORDS]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / "model")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    ).save_pretrained(folder / "model")
    draw = random.Random(1)
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(4, LENGTH))) for _ in range(8 * NUM_STEPS))
    (folder / "data.txt").write_text("\n".join(lines), encoding="utf-8")
    write(folder / "train.py", ANSWER, (*FALLBACKS, OF_ANOTHER_RUN))
    return folder


def write(path: Path, config: TrainConfig, fallbacks: tuple[TrainConfig, ...] = ()) -> None:
    workload = Workload(
        model=str(path.parent / "model"), sequence_length=LENGTH, memory_budget_bytes=10**9
    )
    told = [{"config": each.to_dict()} for each in fallbacks]
    result = {"evidence": "predicted", "fallbacks": told}
    path.write_text(train_py.write(workload=workload, config=config, result=result))


def words(folder: Path, output: str, *options: str, program: str = "train.py") -> list[str]:
    return [
        *(str(folder / program), "--dataset", str(folder / "data.txt"), "--learning-rate", "0.01"),
        *("--output-dir", str(folder / output), "--set", "logging_steps=1", *options),
    ]


@contextlib.contextmanager
def taken_over() -> Iterator[pytest.MonkeyPatch]:
    """This process as one that a program may take over: its environment is put back."""
    with pytest.MonkeyPatch.context() as patch, signals_put_back():
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        before = dict(os.environ)
        yield patch
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def here() -> Iterator[pytest.MonkeyPatch]:
    with taken_over() as patch:
        yield patch


def run(here: pytest.MonkeyPatch, told: list[str], tracker: CappedTracker | None = None) -> None:
    here.setattr(sys, "argv", told)
    with contextlib.nullcontext() if tracker is None else tracker:
        runpy.run_path(told[0], run_name="__main__")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def furthest(one: Path, other: Path) -> float:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, int, int]:
    """The run that nothing disturbs, and the most bytes that it and its first fallback take."""
    peaks = []
    for number in (1, 0):
        with taken_over() as patch:
            tracker = Peak(PLENTY_BYTES)
            run(patch, words(folder, "whole", "--rung", str(number)), tracker)
            peaks.append(tracker.peak_bytes)
    return folder / "whole", peaks[1], peaks[0]


def test_hours_in_it_goes_on_from_the_last_checkpoint(
    folder: Path, whole: tuple[Path, int, int]
) -> None:
    """In a process that starts itself anew. Weights that have seen other samples would be far off."""
    undisturbed, answer_bytes, fallback_bytes = whole
    cap_bytes = (answer_bytes + fallback_bytes) // 2
    assert fallback_bytes < cap_bytes < answer_bytes
    output = folder / "later"
    done = workers.program(
        *(CAPPED, str(cap_bytes), str(output / "checkpoint-3" / "trainer_state.json")),
        *words(folder, "later", "--save-steps", "3"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (said,) = re.findall(r"^Memory ran out .*$", done.stdout, re.MULTILINE)
    assert said.startswith("Memory ran out (CPU out of memory. Tried to allocate ")
    assert said.endswith(
        f"Going on with plan B 1 of 2, micro-batch 4 x 2, from {output / 'checkpoint-3'}."
    )
    assert f"{NUM_STEPS} steps, loss" in done.stdout
    state = json.loads((output / f"checkpoint-{NUM_STEPS}" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    plain = json.loads((undisturbed / f"checkpoint-{NUM_STEPS}" / "trainer_state.json").read_text())
    assert losses == pytest.approx(
        [entry["loss"] for entry in plain["log_history"] if "loss" in entry], rel=1e-4
    )
    assert state["train_batch_size"] == 4
    assert furthest(undisturbed, output) < 1e-4 < 1e-2 < furthest(undisturbed, folder / "model")


@pytest.mark.parametrize(
    ("number", "at_step", "said"),
    [
        (signal.SIGINT, 5, "Stopped at step 5 of 8. The same command goes on with --resume {}."),
        (signal.SIGTERM, 0, "Stopped before the first step. There is no checkpoint yet: the same "
         "command starts at the beginning."),
    ],
)  # fmt: skip
def test_a_run_that_is_stopped_says_how_to_go_on(
    folder: Path, number: int, at_step: int, said: str
) -> None:
    done = workers.program(
        *(STOPPED, str(number), str(at_step)),
        *words(folder, f"stopped-{number}", "--save-steps", "3"),
    )
    assert done.stderr.splitlines()[-1] == said.format(
        folder / f"stopped-{number}" / "checkpoint-3"
    )
    assert (done.returncode, "Traceback" in done.stderr) == (128 + number, False)


@pytest.mark.parametrize("is_notebook", [True, False])
def test_a_notebook_keeps_its_own_handlers(
    monkeypatch: pytest.MonkeyPatch, is_notebook: bool
) -> None:
    """IPython has get_ipython among the builtins while a cell runs."""
    if is_notebook:
        monkeypatch.setattr("builtins.get_ipython", None, raising=False)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    taken: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, _: taken.append(number))
    names = {"os": os, "sys": sys, "signal": signal, "Any": Any, "NoReturn": NoReturn}
    exec(train_py.STOP, {**names, "__name__": "__main__"})
    assert taken == ([] if is_notebook else [signal.SIGINT, signal.SIGTERM])


def test_at_once_it_begins_again(
    folder: Path,
    whole: tuple[Path, int, int],
    here: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After the largest batch is tried, or before, and never from a checkpoint of another run."""
    undisturbed, answer_bytes, fallback_bytes = whole
    started: list[list[str]] = []

    def execve(_program: str, arguments: list[str], _environment: dict[str, str]) -> None:
        started.append(arguments)
        raise Started

    here.setattr(os, "execve", execve)
    earlier = folder / "once" / "checkpoint-5"
    earlier.mkdir(parents=True)
    (earlier / "trainer_state.json").write_text("{}")
    cap_bytes = (answer_bytes + fallback_bytes) // 2
    with pytest.raises(Started):
        run(here, words(folder, "once"), CappedTracker(cap_bytes))
    shown = capsys.readouterr().out
    assert f"{earlier} is left from an earlier run, which --resume would go on with." in shown
    assert "plan B 1 of 2, micro-batch 4 x 2, from the beginning: no checkpoint yet." in shown
    assert started[0][-2:] == ["--rung", "1"]
    run(here, words(folder, "once", "--rung", "1"), CappedTracker(cap_bytes))
    assert furthest(undisturbed, folder / "once") < 1e-4
    with pytest.raises(SystemExit, match="there is no fallback left"):
        run(here, words(folder, "none", "--rung", "2"), CappedTracker(fallback_bytes // 8))


def test_processes_that_share_a_run_are_told_how_to_launch_it_again(
    folder: Path, here: pytest.MonkeyPatch
) -> None:
    """None of them can begin again alone."""
    here.setattr(sys, "argv", ["train.py"])
    program = runpy.run_path(str(folder / "train.py"))
    here.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        program["go_on_with_fallback"](argparse.Namespace(rung=1, resume="out/checkpoint-3"), "so")
    assert ended.value.code == (
        "Memory ran out (so). Launch it again with --rung 2 --resume out/checkpoint-3: plan B 2 of 2, "
        "micro-batch 1 x 8, checkpoint every layer, from out/checkpoint-3"
    )


TRIED = {
    # Dropout draws the random numbers that it would draw anyway.
    "adapter_model": {
        "method": "lora",
        "lora_rank": 4,
        "lora_targets": "all-linear",
        "lora_dropout": 0.3,
        "gradient_accumulation_steps": 2,
    },
    # The backward pass takes its updates back.
    "model": {"update_in_backward": True},
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # PEFT's
@pytest.mark.parametrize("saves", TRIED)
def test_the_trial_of_the_largest_batch_leaves_the_run_as_it_was(
    saves: str, folder: Path, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are the same to the bit."""
    config = dataclasses.replace(ANSWER, micro_batch_size=4, **TRIED[saves])
    write(folder / "tried.py", config)
    text = (folder / "tried.py").read_text()
    untried = text.replace("'tries_largest_batch': True", "'tries_largest_batch': False")
    assert untried != text
    (folder / "untried.py").write_text(untried)
    saved = []
    for name in ("tried", "untried"):
        run(here, words(folder, name, "--max-steps", "3", program=f"{name}.py"))
        saved.append(load_file(folder / name / f"{saves}.safetensors"))
        is_tried = f"The largest batch (4 x {LENGTH} tokens) fits." in capsys.readouterr().out
        assert is_tried == (name == "tried")
    assert all(saved[0][name].equal(saved[1][name]) for name in saved[0])


def test_what_a_long_run_sets(
    folder: Path, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options, --set, and a run that is taken up again where it ended."""
    options = ["--eval-split", "0.25", "--warmup-steps", "0.5", "--save-limit", "1", "--set"]
    former = ["--set", "gradient_checkpointing=true"]
    run(here, words(folder, "long", *options, "max_grad_norm=0.5", *former, "--max-steps", "4"))
    shown = capsys.readouterr().out
    assert shown.count("'eval_loss'") == 4  # a tenth of the run, which is a step at least
    rates = re.findall(r"'learning_rate': '([^']*)'", shown)
    assert list(map(float, rates)) == [0, 0.005, 0.01, 0.005]
    assert [path.name for path in (folder / "long").glob("checkpoint-*")] == ["checkpoint-4"]
    saved = torch.load(folder / "long" / "training_args.bin", weights_only=False)
    assert (saved.max_grad_norm, saved.activation_checkpointing) == (0.5, True)
    run(
        here,
        words(
            folder,
            "long",
            *options,
            "torch_empty_cache_steps=2",
            "--max-steps",
            "6",
            "--resume",
            "--set",
            "save_steps=2",
        ),
    )
    shown = capsys.readouterr().out
    assert (
        "--set torch_empty_cache_steps=2 is not what was chosen: speed and memory may be others."
        in shown
    )
    assert shown.count("'grad_norm'") == 2
    assert shown.count("'eval_loss'") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "warmup_step=3"], "TrainingArguments has no such field. Did you mean warmup_steps?"),
        (["--set", "warmup_steps"], "--set warmup_steps: write it as NAME=VALUE"),
        (["--resume", "nowhere"], "--resume nowhere: no checkpoint is there"),
        (["--rung", "7"], "--rung 7: RECIPE has 2 fallbacks that can be used"),
        (["--eval-split", "0.999"], "--eval-split 0.999: the dataset has 64 samples"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_a_line(
    folder: Path, here: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(here, words(folder, "refused", *options))
    assert said in str(ended.value.code)


def test_every_way_of_running_out_of_memory_is_known() -> None:
    """The messages that a probe takes for a lack of memory, and no other error."""
    program: dict[str, Any] = {}
    text = Path(train_py.__file__).with_name("train.py.template").read_text()
    start = text.index("OUT_OF_MEMORY = (")
    exec(text[start : text.index("STATE =")], program)
    for message in (
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "Triton Error [CUDA]: out of memory",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    ):
        assert says_out_of_memory(message)
        assert any(piece in message.casefold() for piece in program["OUT_OF_MEMORY"])
    assert not any(
        piece in "CUDA error: an illegal memory access" for piece in program["OUT_OF_MEMORY"]
    )


def test_micro_batches_by_tokens_are_those_that_were_predicted(
    folder: Path, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same samples in each step, cut anew: the same weights, from the micro-batches that were priced."""
    padded = dataclasses.replace(ANSWER, micro_batch_size=2, gradient_accumulation_steps=4)
    seen: list[list[int]] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def watched(self: Any, *given: Any, **named: Any) -> Any:
        seen.append(named["attention_mask"].sum(dim=1).tolist())
        assert named["input_ids"].shape == named["labels"].shape
        assert named["input_ids"].shape[1] == max(seen[-1])
        return forward(self, *given, **named)

    here.setattr(LlamaForCausalLM, "forward", watched)
    runs, peaks = {}, {}
    for name in ("padded", "by-tokens"):
        write(folder / f"{name}.py", dataclasses.replace(padded, batching=name))
        seen.clear()
        tracker = Peak(PLENTY_BYTES)
        run(here, words(folder, name, program=f"{name}.py"), tracker)
        runs[name], peaks[name] = list(seen), tracker.peak_bytes
        assert f"The largest batch (2 x {LENGTH} tokens) fits." in capsys.readouterr().out
    tried = slice(4, 6)
    assert runs["padded"][tried] == [[LENGTH, LENGTH]] * 2
    in_order = [each for batch in runs["padded"][:4] + runs["padded"][6:] for each in batch]
    expected: list[list[int]] = []
    for start in range(0, len(in_order), 8):
        step = in_order[start : start + 8]
        expected += [[step[n] for n in cut] for cut in cut_by_tokens(step, 2 * LENGTH)]
        if start == 0:
            num_before = len(expected)
    found = runs["by-tokens"]
    assert found[num_before : num_before + 2] == [[LENGTH, LENGTH]] * 2
    assert found[:num_before] + found[num_before + 2 :] == expected
    assert len(expected) < 4 * NUM_STEPS
    assert max(len(batch) * max(batch) for batch in expected) <= 2 * LENGTH
    # The largest is that of the longest samples: no other cut takes more.
    assert peaks["by-tokens"] <= peaks["padded"] + 3 * 8 * LENGTH * 8
    # By the lengths alone, as a search knows them.
    lengths = Lengths.of(Counter(in_order), LENGTH, num_samples=len(in_order), longest=LENGTH)
    share = sum(in_order) / sum(len(batch) * max(batch) for batch in expected)
    cut = Workload(model="m", memory_budget_bytes=1, lengths=lengths)
    assert cut.filling(
        dataclasses.replace(padded, batching="by-tokens")
    ).useful_share == pytest.approx(share, abs=0.03)
    assert furthest(folder / "padded", folder / "by-tokens") < 1e-4
    # Adam does not care how a gradient is scaled: its norm tells.
    of_padded, of_tokens = (
        [
            (entry["loss"], entry["grad_norm"])
            for entry in json.loads(state.read_text())["log_history"]
            if "loss" in entry
        ]
        for name in ("padded", "by-tokens")
        for state in (folder / name).glob(f"checkpoint-{NUM_STEPS}/trainer_state.json")
    )
    assert len(of_padded) == NUM_STEPS
    for one, other in zip(of_padded, of_tokens, strict=True):
        assert other == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["max_step=3"], "DPOConfig has no such field. Did you mean max_steps?"),
        (["max_steps"], "--set max_steps: write it as NAME=VALUE"),
        (["report_to=none-such"], "report_to none-such: no library of that name"),
        (["load_best_model_at_end=true", "eval_strategy=epoch"],
         "--set load_best_model_at_end=true --set eval_strategy=epoch: "),
    ],
)  # fmt: skip
def test_a_program_of_trl_says_what_it_cannot_set(given: list[str], said: str) -> None:
    trl = pytest.importorskip("trl")
    program = settings_code()
    with pytest.raises(SystemExit, match=re.escape(said)):
        program["with_settings"](
            trl.DPOConfig(use_cpu=True, bf16=False, activation_checkpointing=False),
            asked(*given, eval_split=0.1),
        )


def test_settings_of_a_program_of_trl_go_over_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    trl = pytest.importorskip("trl")
    made = trl.GRPOConfig(
        output_dir="o",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,
        num_generations=2,
    )
    program = settings_code()
    assert program["with_settings"](made, asked()) is made
    with pytest.raises(SystemExit, match="The evaluation: The global eval batch size"):
        program["with_settings"](made, asked(eval_split=0.1))
    given = ["num_train_epochs=2", "per_device_train_batch_size=2", "lr_scheduler_type=cosine"]
    found = program["with_settings"](made, asked(*given))
    assert (found.num_train_epochs, found.per_device_train_batch_size) == (2, 2)
    assert (found.generation_batch_size, found.output_dir) == (2, "o")
    assert found.lr_scheduler_type == "cosine"
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        "--set per_device_train_batch_size=2 is not what was chosen: speed and memory may be others."
    ]


BEST = {
    "eval_strategy": "steps",
    "save_steps": 50,
    "eval_steps": 50,
    "load_best_model_at_end": True,
}


@pytest.mark.parametrize(
    ("chosen", "given", "share", "evaluated", "free"),
    [
        ({}, [], 0.1, ("steps", 500, False), ["save_steps", "eval_steps"]),
        ({}, ["load_best_model_at_end=true"], 0.1, ("steps", 500, True), ["save_steps", "eval_steps"]),
        ({"save_steps": 50}, [], 0.1, ("steps", 50, False), []),
        ({}, ["save_strategy=epoch"], 0.1, ("epoch", 500, False), []),
        (BEST, [], 0.1, ("steps", 50, True), []),
        (BEST, [], None, ("no", 50, False), []),
        ({}, ["eval_strategy=steps"], None, ("no", None, False), ["save_steps"]),
        ({}, [], None, ("no", None, False), ["save_steps"]),
    ],
)  # fmt: skip
def test_a_program_of_trl_evaluates_at_its_checkpoints(
    chosen: dict[str, Any],
    given: list[str],
    share: float | None,
    evaluated: tuple[str, int, bool],
    free: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where there are samples to evaluate on, whatever the file that it was made from had said."""
    trl = pytest.importorskip("trl")
    made = trl.DPOConfig(use_cpu=True, bf16=False, activation_checkpointing=False, **chosen)
    options = asked(*given, eval_split=share)
    found = settings_code()["with_settings"](made, options)
    assert (found.eval_strategy, found.eval_steps, found.load_best_model_at_end) == evaluated
    assert options.free_intervals == free
    off = "Without --eval-dataset or --eval-split there is nothing to evaluate: no eval_strategy"
    assert (off in capsys.readouterr().out) is (share is None and bool(chosen or given))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated")  # TRL's default
def test_the_program_for_unsloth_goes_on_and_evaluates(
    folder: Path, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but Unsloth itself, which needs a card: Transformers loads the model here."""
    pytest.importorskip("trl")
    config = dataclasses.replace(ANSWER, trainer="trl-sft")
    workload = Workload(model=str(folder / "model"), memory_budget_bytes=10**9)
    program = folder / "train_unsloth.py"
    program.write_text(unsloth_py.write(workload=workload, config=config, result=PREDICTED))
    lines = (folder / "data.txt").read_text(encoding="utf-8").splitlines()
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    stands_in: Any = types.ModuleType("unsloth")
    stands_in.FastLanguageModel = types.SimpleNamespace(from_pretrained=model_and_tokenizer)
    here.setitem(sys.modules, "unsloth", stands_in)
    told = [str(program), str(folder / "rows.jsonl"), "--eval-split", "0.25"]
    for name, value in {"output_dir": folder / "unsloth", "use_cpu": True, "bf16": False}.items():
        told += ["--set", f"{name}={value}"]
    run(here, [*told, "--set", "max_steps=2"])
    assert capsys.readouterr().out.count("'eval_loss'") == 2
    run(here, [*told, "--set", "max_steps=3", "--resume"])
    assert capsys.readouterr().out.count("'eval_loss'") == 1
    saved = [path.name for path in (folder / "unsloth").glob("checkpoint-*")]
    assert sorted(saved) == ["checkpoint-2", "checkpoint-3"]


def model_and_tokenizer(model_name: str, **_: Any) -> tuple[Any, Any]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_name)
    return LlamaForCausalLM.from_pretrained(model_name), tokenizer


def asked(*pairs: str, eval_split: float | None = None) -> argparse.Namespace:
    return argparse.Namespace(set=[*pairs], eval_split=eval_split, eval_dataset=None)


def settings_code() -> dict[str, Any]:
    """The functions of a program whose arguments are made before its options are read."""
    import difflib

    from transformers import HfArgumentParser
    from transformers.integrations import get_available_reporting_integrations

    needed = (argparse, dataclasses, difflib, random, sys)
    program: dict[str, Any] = {module.__name__: module for module in needed}
    program |= {
        "Any": Any,
        "HfArgumentParser": HfArgumentParser,
        "get_available_reporting_integrations": get_available_reporting_integrations,
    }
    exec(train_py.settings_code(["num_generations"]), program)
    return program
