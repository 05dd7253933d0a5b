"""A question on its way: what it carries, what stays, and how it is read elsewhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import answers
import pytest

from autotune.catalogue import gpus
from autotune.common.files import Disk
from autotune.errors import ConfigError, HardwareError, NothingFitsError, WorkerError
from autotune.jobs import asking
from autotune.records.answer import Answer, stored_record
from autotune.records.question import Question
from autotune.report.answer_files import AnswerFiles
from autotune.search import resolve
from autotune.search.budget import CardSource, ChosenCard
from autotune.space.config import TrainConfig
from autotune.space.dataset import Dataset
from autotune.space.lengths import Lengths
from autotune.store.jobs import Job, WantedMachine, WorkerMachine, open_jobs

SPACE = """
name: small
methods:
  full:
    micro_batch_size: [1, 2]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
"""
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_positions": 256, "vocab_size": 100}
BASES = Path(__file__).parents[1] / "data" / "bases"
CARD = "NVIDIA RTX 4090"
MACHINE = WorkerMachine(worker="w", card=CARD, capacity_bytes=10**12, fingerprint="f")
NAMED = {"model": "Qwen/Qwen2.5-1.5B", "gpu": "rtx-4090"}
DATASET = Dataset(
    name="data.jsonl", format="text", loss_on="all", text_field="body", tokenizer="mine"
)
LENGTHS = Lengths(
    num_samples=10, num_tokens=900, num_kept_tokens=800, percentiles=(*range(20, 120), 128)
)


def card_of(budget_bytes: int) -> ChosenCard:
    return ChosenCard(gpu=gpus.find_gpu(CARD), source=CardSource.NAMED, budget_bytes=budget_bytes)


def prepared(*notes: list[str], **options: Any) -> tuple[dict[str, Any], WantedMachine]:
    note = notes[0].append if notes else print
    question, wanted = asking.prepare(Question(**options), note=note)
    # As the database gives it back.
    return json.loads(json.dumps(question)), wanted


def test_a_question_needs_no_file_where_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop, machine = tmp_path / "laptop", tmp_path / "machine"
    (laptop / "mine").mkdir(parents=True)
    machine.mkdir()
    (laptop / "mine" / "config.json").write_text(json.dumps(MODEL))
    (laptop / "small.yaml").write_text(SPACE)
    monkeypatch.chdir(laptop)
    options = {
        "model": "mine",
        "gpu": "rtx-4090",
        "gpu_mem": "12GB",
        "methods": ("full", "lora"),
        "seq_len": 128,
    }
    question, wanted = prepared(**options, space="small.yaml")
    assert wanted == WantedMachine(card="NVIDIA RTX 4090", budget_bytes=12 * 10**9)
    monkeypatch.chdir(machine)
    asked = asking.read(question, machine, backend="cuda")
    assert asked.brought.source is not None
    assert (asked.brought.source.name, asked.brought.source.config) == ("mine", MODEL)
    assert Path(asked.options.space).read_text() == SPACE
    given = Question(**options, backend="cuda")  # type: ignore[arg-type]
    assert dataclasses.replace(asked.options, space="default") == given


def test_a_shipped_space_goes_by_its_name() -> None:
    question, wanted = prepared(model="gpt2", gpu="rtx-4090", space="quick")
    assert question["space"] is None
    assert question["options"]["space"] == "quick"
    assert wanted.budget_bytes is None


def test_probes_on_a_cpu_want_one_and_a_budget() -> None:
    assert prepared(model="gpt2", backend="cpu", gpu_mem="500MB")[1] == WantedMachine(
        card="CPU", budget_bytes=500_000_000
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "There is no model"),
        ({"gpu": None}, "needs to know the card"),
        ({"gpu": None, "backend": "cpu"}, "no memory budget"),
        ({"backend": "cpu", "gpu_mem": "1GB"}, "--gpu does not go with --backend cpu"),
        ({"backend": "predict"}, "A prediction needs no other machine"),
        ({"num_gpus": 2}, "Probes run on one GPU"),
        ({"gpu_mem": "30GB"}, "more than the"),
        ({"gpu_mem": "much"}, "much"),
        ({"model": "gtp2"}, "gpt2"),
        ({"space": "nowhere.yaml"}, "no search space"),
        ({"seq_len": 5000}, "too long"),
        ({"base": Path("run.yaml")}, "run.yaml cannot be read. No such file"),
        ({"base": BASES / "sft.yaml", "seq_len": 64}, "--seq-len is 64, and the base has 2048"),
    ],
)
def test_what_no_other_machine_can_answer_is_refused_here(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        prepared(**{**NAMED, "model": "openai-community/gpt2", **options})
    assert message in str(refused.value)


def test_a_base_of_several_gpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    with pytest.raises(ConfigError, match="2 GPUs do not go with --enqueue"):
        prepared(**NAMED, base=tmp_path / "ddp.yaml")


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"schema_version": 99},
        {"schema_version": 1, "options": {"new": 1}},
        {"options": {"base": "run.yaml"}},
        {"options": {"dataset": "data.jsonl"}, "lengths": {"percentiles": [], "num_samples": "1"}},
    ],
)
def test_a_question_of_another_version_is_refused(question: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        asking.read(
            {"schema_version": 2, "space": None, "model": {}, **question}, tmp_path, backend="cpu"
        )


def test_what_older_workers_understand_is_still_of_their_version() -> None:
    """They read version 1, and refuse a newer one."""
    assert prepared(**NAMED)[0]["schema_version"] == 1
    assert prepared(**NAMED, base=BASES / "training_arguments.yaml")[0]["schema_version"] == 2


def test_of_a_dataset_its_lengths_alone_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[tuple[Any, ...]] = []

    def read_dataset(asked: Question, _: Any, *more: Any) -> tuple[Dataset, Lengths]:
        asked_for.append((asked.dataset, asked.text_field, asked.tokenizer, *more))
        return DATASET, LENGTHS

    monkeypatch.setattr(resolve, "read_dataset", read_dataset)
    options = {
        **NAMED,
        "dataset": "data.jsonl",
        "text_field": "body",
        "tokenizer": "mine",
        "seq_len": 128,
    }
    notes: list[str] = []
    question, _ = prepared(notes, **options)
    assert asked_for == [("data.jsonl", "body", "mine", "causal-lm", 128)]
    assert question["lengths"] == {
        **dataclasses.asdict(LENGTHS),
        "percentiles": [*range(20, 120), 128],
    }
    assert "no loader is timed" in notes[-1]
    asked = asking.read(question, tmp_path, backend="cpu")
    taken = resolve.resolve(
        asked.options, card=card_of(10**9), note=notes.append, brought=asked.brought
    )
    assert (taken.workload.dataset, taken.workload.lengths) == (DATASET, LENGTHS)
    assert len(asked_for) == 1


SECRET = "s3cret-w0rd"
FOLDER = {
    "training_args.json": (BASES / "training_arguments.json").read_text(),
    "exports/adapter_config.json": '{"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}',
}
DEEPSPEED = {
    "accelerate.yaml": """
distributed_type: DEEPSPEED
num_processes: 1
deepspeed_config: {deepspeed_config_file: ds.json}
""",
    "ds.json": """{
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
  "train_micro_batch_size_per_gpu": 2,
  "bf16": {"enabled": true}
}
""",
}
OURS = """
version: 1
config: {method: full, micro_batch_size: 2, gradient_accumulation_steps: 4, sequence_length: 512,
  precision: bf16-true, optimizer: sgd}
"""
THEIRS: dict[str, dict[str, str]] = {
    **{path.name: {path.name: path.read_text()} for path in BASES.glob("*.*ml")},
    "training_arguments.json": {"training_arguments.json": FOLDER["training_args.json"]},
    "qlora.py": {"qlora.py": (BASES / "qlora.py.txt").read_text() + f"login(token='{SECRET}')\n"},
    "secret.yaml": {
        "secret.yaml": f"base_model: x\nhub_token: {SECRET}  # mine\nsequence_len: 512\n"
    },
    "accelerate.yaml": DEEPSPEED,
    "run": {f"run/{name}": text for name, text in FOLDER.items()},
    "train_config.yaml": {"train_config.yaml": OURS},
    "ours": {
        "ours/train_config.yaml": OURS,
        "ours/training_args.json": FOLDER["training_args.json"],
    },
}


def written(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def answer_to(base: TrainConfig) -> Answer:
    """Twice the micro-batch and another optimizer."""
    best = dataclasses.replace(
        base, micro_batch_size=2 * base.micro_batch_size, optimizer="adamw_torch_fused"
    )
    return answers.answer(best=answers.estimate(best), base=base)


def answered_job(question: dict[str, Any], answer: Answer, folder: Path) -> Job:
    result = stored_record(answer)
    with open_jobs(f"sqlite:///{folder}/jobs.db") as jobs:
        number = jobs.add(
            question, WantedMachine(card=CARD, budget_bytes=None), command="", asked_by=""
        )
        assert jobs.claim(MACHINE) is not None
        assert jobs.finish(number, MACHINE.worker, study="s", result=result, problem="")
        return jobs.get(number)


@pytest.mark.parametrize("name", THEIRS)
def test_a_base_goes_as_text_and_comes_back_as_find_gives_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop, machine = tmp_path / "laptop", tmp_path / "machine"
    written(laptop, THEIRS[name])
    (laptop / "beside.yaml").write_text("not: asked for")
    machine.mkdir()
    monkeypatch.chdir(laptop)
    options = {**NAMED, "base": Path(name)}
    question, _ = prepared(**options)
    texts = {str(Path(path).relative_to(laptop)) for path in question["base"]["texts"]}
    assert texts == set(THEIRS[name])
    assert "s3cret" not in json.dumps(question)

    monkeypatch.chdir(machine)
    laptop.rename(tmp_path / "away")
    asked = asking.read(question, machine, backend="cuda")
    card = gpus.find_gpu(CARD)
    run = resolve.read_run(asked.options, card, note=print, files=asked.brought.files)
    (tmp_path / "away").rename(laptop)
    monkeypatch.chdir(laptop)
    local = resolve.read_run(Question(**options), card, note=print, files=Disk())
    assert run is not None
    assert local is not None
    assert run.config == local.config
    assert list(machine.iterdir()) == []

    answer = answer_to(run.config)
    there = AnswerFiles.of(answer, folder=Path("there"), run=local)
    here, notes = asking.answered(answered_job(question, answer, tmp_path), Path("there"))
    assert (here.notes, notes) == (there.notes, [])
    assert here.result == there.result
    expected = {path: path.read_text() for path in there.write()}
    assert {path: path.read_text() for path in here.write()} == expected
    assert ("s3cret" in json.dumps(list(expected.values()))) == (
        name in ("qlora.py", "secret.yaml")
    )


def test_what_did_not_come_with_a_question_is_not_read_where_it_is_answered(tmp_path: Path) -> None:
    written(tmp_path, DEEPSPEED)
    question, _ = prepared(**NAMED, base=tmp_path / "accelerate.yaml")
    del question["base"]["texts"][str(tmp_path / "ds.json")]
    asked = asking.read(question, tmp_path, backend="cuda")
    with pytest.raises(ConfigError, match=r"ds\.json did not come with the question"):
        resolve.read_run(asked.options, gpus.find_gpu(CARD), note=print, files=asked.brought.files)


def test_the_model_may_be_the_base_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question, _ = prepared(gpu="rtx-4090", base=BASES / "axolotl.yaml")
    assert "model" not in question["options"]
    asked = asking.read(question, tmp_path, backend="cuda")
    monkeypatch.setattr(resolve, "find_model", lambda _: pytest.fail("it came with the question"))
    taken = resolve.resolve(asked.options, card=card_of(10**9), note=print, brought=asked.brought)
    assert taken.workload.model == "Qwen/Qwen2.5-1.5B"


@pytest.mark.parametrize("now", ["base_model: x\nsequence_len: 4096\n", None])
def test_a_base_that_has_changed_since_comes_back_as_it_was_asked_about(
    now: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "secret.yaml"
    written(tmp_path, THEIRS["secret.yaml"])
    question, _ = prepared(**NAMED, base=path)
    run = resolve.read_run(
        Question(**NAMED, base=path), gpus.find_gpu(CARD), note=print, files=Disk()
    )
    assert run is not None
    if now is None:
        path.unlink()
    else:
        path.write_text(now)
    job = answered_job(question, answer_to(run.config), tmp_path)
    here, (note,) = asking.answered(job, tmp_path)
    assert "secret.yaml is gone or has changed since the question was asked" in note
    assert "with *** for its secrets" in note
    (copy,) = (file for file in here.write() if file.name.startswith("secret"))
    # Never over what is there now.
    assert copy == tmp_path / "yours" / "secret.yaml"
    assert copy.read_text() == (
        "base_model: x\nhub_token: '***'  # mine\nsequence_len: 512\nmicro_batch_size: 2\n"
    )


def test_the_files_of_an_answer_are_those_of_find(tmp_path: Path) -> None:
    job = answered_job(prepared(**NAMED)[0], answers.answer(), tmp_path)
    here, notes = asking.answered(job, tmp_path / "out")
    files = here.write()
    assert (here.answer.exported, here.notes, notes) == (answers.CONFIG, (), [])
    assert {"train.py", "train_config.yaml", "result.json"} <= {path.name for path in files}
    assert all(path.exists() for path in files)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["files"] == [
        str(path) for path in files
    ]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(4, NothingFitsError), (3, HardwareError), (1, WorkerError), (None, WorkerError)],
)
def test_why_there_is_no_answer_ends_the_command_as_it_would_have_here(
    code: int | None, kind: type[Exception]
) -> None:
    error = asking.error_of("Nothing fits.", code)
    assert type(error) is kind
    assert str(error) == "Nothing fits."
