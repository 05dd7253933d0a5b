"""What a question about one configuration comes to."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import answers
import pytest
import yaml

from autotune.catalogue import host_memory, models
from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.tasks import PICTURES
from autotune.errors import ConfigError
from autotune.records.question import Question
from autotune.search import budget
from autotune.search import estimate as estimate_module
from autotune.search import find as find_module
from autotune.search import resolve as resolve_module
from autotune.search.budget import CardSource, ChosenCard
from autotune.search.listener import SILENT
from autotune.search.resolve import Problem, resolve, resolve_configuration
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import TrainConfig
from autotune.space.dataset import Dataset
from autotune.space.defaults import default_base
from autotune.space.headroom import NO_HEADROOM, USUAL_HEADROOM
from autotune.space.lengths import Lengths
from autotune.space.media import Media
from autotune.space.trainers import BY_TASK, TRAINERS, trainers_of

QUESTION = Question(model="Qwen/Qwen2.5-0.5B", gpu="rtx-4090", gpu_mem="12GB", accumulation=4)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({}, "full"),
        ({"micro_batch_size": 2, "optimizer": "sgd"}, "full"),
        ({"peft": '{"peft_type":"LOHA","r":4}'}, "peft"),
    ],
)
def test_what_is_not_set_is_as_by_default(settings: dict[str, Any], method: str) -> None:
    found = resolve_configuration(dataclasses.replace(QUESTION, settings=settings))
    assert (found.config.method, found.workload.methods) == (method, (method,))
    assert found.config.sequence_length == found.workload.sequence_length == 1024
    assert found.config.gradient_accumulation_steps == 4
    assert found.workload.effective_batch_size == 4 * found.config.micro_batch_size
    assert found.workload.memory_budget_bytes == found.card.budget_bytes == 12 * 10**9
    assert found.card.gpu.name == "NVIDIA RTX 4090"
    assert found.source.name == found.workload.model == QUESTION.model
    for name, value in settings.items():
        assert getattr(found.config, name) == value


BASES = Path(__file__).parents[1] / "data" / "bases"


@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        ({}, {}),
        ({"accumulation": 3, "seq_len": 64}, {"gradient_accumulation_steps": 3, "sequence_length": 64}),
        ({"num_gpus": 2}, {"num_gpus": 2, "parallelism": "ddp"}),
        ({"settings": {"micro_batch_size": 1, "lora_rank": 4}}, {"micro_batch_size": 1, "lora_rank": 4}),
    ],
)  # fmt: skip
def test_what_is_typed_beside_a_base_overrules_it(
    asked: dict[str, Any], changed: dict[str, Any]
) -> None:
    question = Question(gpu="rtx-4090", base=BASES / "axolotl.yaml")
    base = resolve_configuration(question)
    assert (base.config.method, base.config.lora_rank) == ("qlora", 32)
    assert base.source.name == "Qwen/Qwen2.5-1.5B"
    found = resolve_configuration(dataclasses.replace(question, **asked))
    assert found.config == dataclasses.replace(base.config, **changed)
    assert found.workload.effective_batch_size == found.config.effective_batch_size
    with pytest.raises(ConfigError, match=r"--method is full, and .* has qlora"):
        resolve_configuration(dataclasses.replace(question, methods=("full",)))


OF_WORDS = ("causal-lm", "sequence-classification", "token-classification", *BY_TASK)


@pytest.mark.parametrize("length", [None, 64])
@pytest.mark.parametrize("task", OF_WORDS)
def test_a_search_and_an_estimate_take_a_base_as_it_is(
    task: str, length: int | None, tmp_path: Path
) -> None:
    """It is the file of an answer, which names the model and the task."""
    teacher = QUESTION.model if task == "distillation" else None
    asked = Question(
        model=QUESTION.model, gpu="rtx-4090", task=task, teacher=teacher, seq_len=length
    )
    begun = resolve(asked)
    assert begun.base is begun.run is None
    config = default_base(begun.workload, begun.card.gpu, begun.source)
    assert (config.sequence_length, config.trainer) == (length or 1024, trainers_of(task)[0])
    base = saved(tmp_path, config, task=task, **({"teacher": teacher} if teacher else {}))
    search, estimate = (
        ask(Question(base=base, gpu="rtx-4090")) for ask in (resolve, resolve_configuration)
    )
    assert search.base == estimate.config == config
    assert search.workload.methods[0] == "full"
    alike = dataclasses.replace(search.workload, methods=(config.method,))
    assert alike == estimate.workload == dataclasses.replace(begun.workload, methods=("full",))
    assert search.source.config == estimate.source.config == begun.source.config
    assert (search.backend, search.trains_elsewhere, search.reads_dataset) == (None, False, False)
    # It is compared at its own length and batch, and with what it has.
    for option, wrong in (("seq_len", 65), ("effective_batch", 96), ("num_gpus", 2)):
        with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} is {wrong}"):
            resolve(Question(base=base, gpu="rtx-4090", **{option: wrong}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--method is lora, and .* has full"):
        resolve_configuration(Question(base=base, gpu="rtx-4090", methods=("lora",)))


@pytest.mark.parametrize("task", OF_WORDS)
def test_one_configuration_is_the_defaults_with_what_was_set(task: str) -> None:
    generates = BY_TASK[task].generates if task in BY_TASK else None
    whole = generates.num_generations if generates else 1
    teacher = QUESTION.model if task == "distillation" else None
    asked = dataclasses.replace(
        QUESTION, task=task, teacher=teacher, accumulation=None, seq_len=100
    )
    found = resolve_configuration(asked)
    usual = default_base(found.workload, found.card.gpu, found.source)
    assert found.config == dataclasses.replace(usual, gradient_accumulation_steps=whole)
    least = TRAINERS[trainers_of(task)[0]].least_micro_batch
    assert found.config.micro_batch_size == least
    assert found.workload.effective_batch_size == least * whole
    assert (found.workload.task, found.config.sequence_length) == (task, 100)
    set_ones = {"optimizer": "sgd", "activation_checkpointing": 1, "micro_batch_size": 4}
    changed = resolve_configuration(
        dataclasses.replace(asked, settings=set_ones, accumulation=whole)
    )
    assert changed.config == dataclasses.replace(found.config, **set_ones)
    assert changed.workload.effective_batch_size == 4 * whole
    # A plan that is to be solved stays to be solved; it must be possible.
    solve = {"activation_checkpointing": SOLVE}
    if not generates and (task not in BY_TASK or not BY_TASK[task].passes_without_gradients):
        solved = resolve_configuration(dataclasses.replace(asked, settings=solve))
        assert solved.config == dataclasses.replace(found.config, **solve)


@pytest.mark.parametrize(
    ("task", "settings", "num_gpus", "passes"),
    [
        ("grpo", {}, None, 8),
        ("grpo", {}, 2, 4),
        ("grpo", {}, 3, 8),
        ("grpo", {"micro_batch_size": 16}, None, 1),
        ("grpo", {"micro_batch_size": 4, "num_generations": 6}, None, 3),
        ("rloo", {}, None, 2),
        ("dpo", {"micro_batch_size": 3}, None, 1),
    ],
)
def test_a_step_of_one_configuration_has_whole_groups_of_completions(
    task: str, settings: dict[str, Any], num_gpus: int | None, passes: int
) -> None:
    asked = dataclasses.replace(
        QUESTION, task=task, settings=settings, num_gpus=num_gpus, accumulation=None
    )
    config = resolve_configuration(asked).config
    assert config.gradient_accumulation_steps == passes
    assert config.effective_batch_size % (config.num_generations or 1) == 0


@pytest.mark.parametrize(
    ("parallelism", "num_gpus", "batch"),
    [("fsdp2", 4, 4), ("tp", 4, 1), ("pp", 2, 1), (None, 2, 2), (None, None, 1)],
)
def test_gpus_share_one_configuration_as_it_says(
    parallelism: str | None, num_gpus: int | None, batch: int
) -> None:
    """What no trainer runs is priced all the same."""
    settings = {} if parallelism is None else {"parallelism": parallelism}
    if parallelism in ("tp", "pp"):
        settings["optimizer"] = "adamw_torch"
    asked = dataclasses.replace(QUESTION, num_gpus=num_gpus, settings=settings)
    found = resolve_configuration(asked)
    assert found.config.parallelism == (parallelism or ("ddp" if num_gpus else "none"))
    assert (found.config.num_gpus, found.workload.num_gpus) == ((num_gpus or 1),) * 2
    assert found.workload.effective_batch_size == found.config.effective_batch_size == 4 * batch


@pytest.mark.parametrize(
    ("of_base", "asked", "parallelism"),
    [
        ({}, 2, "ddp"),
        ({"parallelism": "fsdp2", "num_gpus": 4}, 2, "fsdp2"),
        ({"parallelism": "fsdp2", "num_gpus": 4}, None, "fsdp2"),
        ({"parallelism": "fsdp2", "num_gpus": 4}, 1, "none"),
    ],
)
def test_another_number_of_gpus_is_shared_as_the_base_does(
    of_base: dict[str, Any], asked: int | None, parallelism: str, tmp_path: Path
) -> None:
    begun = resolve_configuration(QUESTION).config
    config = dataclasses.replace(begun, precision="bf16-mixed", **of_base)
    base = saved(tmp_path, config)
    found = resolve_configuration(Question(base=base, gpu="rtx-4090", num_gpus=asked))
    number = asked or config.num_gpus
    assert found.config == dataclasses.replace(config, num_gpus=number, parallelism=parallelism)
    assert found.workload.effective_batch_size == 4 * number


def saved(folder: Path, config: TrainConfig, **named: str) -> Path:
    """The file of an answer, which names the model."""
    base = folder / "train_config.yaml"
    workload = {"model": QUESTION.model, **named}
    content = {"version": 1, "workload": workload, "config": config.to_dict()}
    base.write_text(yaml.safe_dump(content), encoding="utf-8")
    return base


VIT = {"model_type": "vit", "image_size": 224, "num_hidden_layers": 2, "hidden_size": 64}


@pytest.mark.parametrize("ask", [resolve, resolve_configuration])
def test_a_sample_that_is_one_picture_is_as_one_token(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    asked = dataclasses.replace(QUESTION, model=str(tmp_path), task="image-classification")
    found = ask(asked)
    assert found.workload.sequence_length == 1
    assert found.workload.pictures.size == "224x224"
    with pytest.raises(ConfigError, match="--seq-len does not go with"):
        ask(dataclasses.replace(asked, seq_len=8))
    # Whatever length a base was written with.
    begun = resolve_configuration(asked).config
    for length in (1, 64):
        config = dataclasses.replace(begun, sequence_length=length)
        base = saved(tmp_path, config, model=str(tmp_path), task="image-classification")
        again = ask(Question(base=base, gpu="rtx-4090"))
        assert (again.base if ask is resolve else again.config) == begun


@pytest.mark.parametrize("ask", [resolve, resolve_configuration])
def test_samples_with_pictures_are_as_long_as_the_longest_of_the_dataset(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Media(num_images=1, width=8, height=8, num_tokens=9, tensors=())
    lengths = Lengths.of({60: 1, 300: 1}, 1024, num_samples=2, longest=300)
    monkeypatch.setattr(resolve_module, "read_pictures", lambda *_, **__: (seen, lengths))
    monkeypatch.setattr(resolve_module, "read_dataset", lambda *_, **__: pytest.fail("it is read"))
    asked = dataclasses.replace(QUESTION, task=PICTURES, dataset="seen", accumulation=None)
    notes: list[str] = []
    found = ask(asked, note=notes.append)
    assert found.workload.sequence_length == 300
    assert (found.workload.lengths, found.workload.pictures) == (lengths, seen)
    assert found.workload.dataset is None
    assert notes == ["no sample has more than 300 tokens: that is the sequence length."]


def test_a_study_has_its_settings_in_its_name(tmp_path: Path) -> None:
    adapter = '{"peft_type":"OFT","r":8}'
    digest = hashlib.sha256(adapter.encode()).hexdigest()[:6]
    of_peft = resolve(dataclasses.replace(QUESTION, peft=adapter))
    assert of_peft.study == f"qwen2.5-0.5b-12gb-peft-nvidia-rtx-4090-{digest}"
    assert [change.why for change in of_peft.changes] == ["--peft"]
    assert of_peft.workload.methods == ("peft",)
    own = tmp_path / "own.yaml"
    own.write_text(
        "name: own\nmethods:\n  full:\n    micro_batch_size: [1]\n    precision: [bf16-true]\n"
        "    optimizer: [sgd]\n    neftune_noise_alpha: [7.5]\n"
    )
    values = hashlib.sha256(json.dumps({"neftune_noise_alpha": [7.5]}).encode()).hexdigest()[:6]
    of_space = dataclasses.replace(QUESTION, space=str(own), methods=("full",))
    assert resolve(of_space).study == f"qwen2.5-0.5b-12gb-full-nvidia-rtx-4090-{values}"
    with pytest.raises(ConfigError, match="cannot name a study"):
        resolve(dataclasses.replace(QUESTION, study=" "))


def test_what_is_to_be_compiled_is_a_change_of_the_space() -> None:
    found = resolve(dataclasses.replace(QUESTION, compile_mode="max-autotune"))
    assert [change.why for change in found.changes] == ["--compile"]
    assert all("max-autotune" in each.domains["torch_compile"] for each in found.space.methods)


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"base": "axolotl.yaml"}, ["axolotl switches its fused", "axolotl.yaml: only its edited"]),
        (
            {"base": "sft.yaml", "gpu": "t4"},
            ["sft.yaml cannot run on this card", "only its edited"],
        ),
        (
            {"base": "training_arguments.json", "model": "google-bert/bert-base-uncased"},
            ["", "", "--seq-len 1024 is assumed", "positions for 512 tokens: --seq-len 512 is"],
        ),
        ({"model": "google-t5/t5-base", "gpu": "t4"}, ["may leave float16's range"]),
        (
            {"model": "google-bert/bert-base-uncased"},
            ["positions for 512 tokens: --seq-len 512 is"],
        ),
        ({"model": "google-bert/bert-base-uncased", "seq_len": 512}, []),
        ({}, []),
    ],
)
def test_what_a_search_says_of_its_question(question: dict[str, Any], said: list[str]) -> None:
    notes: list[str] = []
    if "base" in question:
        question = {"model": None, **question, "base": BASES / question["base"]}
    resolve(dataclasses.replace(QUESTION, accumulation=None, **question), note=notes.append)
    assert len(notes) == len(said)
    assert all(part in note for part, note in zip(said, notes, strict=True))


@pytest.mark.parametrize("asks", [resolve, resolve_configuration])
def test_a_base_waits_for_what_the_hub_says_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Callable[[Question], Any]
) -> None:
    """Modules of an adapter and the dtype of weights follow from it."""
    config = tmp_path / "config.json"

    def download(_: str) -> Path:
        said = {"model_type": "roberta", "vocab_size": 99, "max_position_embeddings": 130}
        config.write_text(json.dumps(said), encoding="utf-8")
        return config

    def cached(_: str) -> Path:
        if config.exists():
            return config
        raise ConfigError("not here")

    monkeypatch.setattr(models, "_download", download)
    monkeypatch.setattr(models, "_cached", cached)
    base = tmp_path / "mine.py"
    base.write_text(
        "m = AutoModelForSequenceClassification.from_pretrained('some/roberta')\n"
        "m = get_peft_model(m, LoraConfig(r=8))\n"
        "t = Trainer(m, TrainingArguments('o', bf16=True, per_device_train_batch_size=4))\n"
    )
    found = asks(
        dataclasses.replace(QUESTION, model=None, accumulation=None, base=base, seq_len=64)
    )
    config_read = found.base if isinstance(found, Problem) else found.config
    assert (config_read.lora_targets, config_read.precision) == ("query,value", "bf16-mixed")


def test_a_run_of_another_trainer_that_is_only_predicted_needs_nothing_here(tmp_path: Path) -> None:
    of_axolotl = Question(base=BASES / "axolotl.yaml", gpu="rtx-4090")
    own = Question(base=saved(tmp_path, resolve_configuration(QUESTION).config), gpu="rtx-4090")
    for question, trains_elsewhere in ((of_axolotl, True), (own, False), (QUESTION, False)):
        problem = resolve(question)
        assert problem.trains_elsewhere is trains_elsewhere
        measured = dataclasses.replace(problem, backend="cuda")
        assert not measured.trains_elsewhere
        assert measured.predicted().trains_elsewhere is trains_elsewhere


def test_float16_is_warned_of_where_it_was_chosen(tmp_path: Path) -> None:
    t5 = dataclasses.replace(QUESTION, model="google-t5/t5-base", accumulation=1)
    for precision, is_said in (("fp16-mixed", True), ("bf16-mixed", False)):
        notes: list[str] = []
        of_t5 = dataclasses.replace(t5, settings={"precision": precision})
        config = resolve_configuration(of_t5, note=notes.append).config
        base = saved(tmp_path, config, model="google-t5/t5-base")
        resolve(Question(base=base, gpu="rtx-4090"), note=notes.append)
        warned = sum("may leave float16's range" in note for note in notes)
        assert warned == (2 if is_said else 0)


@pytest.mark.parametrize(("is_here", "note"), [(True, "5 GiB are free"), (True, ""), (False, "x")])
def test_a_card_that_is_here_is_said_with_what_is_special(
    is_here: bool, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CardSource.FOUND if is_here else CardSource.NAMED
    card = ChosenCard(gpu=find_gpu("t4"), source=source, budget_bytes=10**9, note=note)
    monkeypatch.setitem(resolve_module.CHOOSERS, "auto", lambda *_: card)
    monkeypatch.setattr(resolve_module.nvml, "alike", list)
    notes: list[str] = []
    problem = resolve(dataclasses.replace(QUESTION, gpu=None, gpu_mem=None), note=notes.append)
    assert any("5 GiB are free" in each for each in notes) == (is_here and bool(note))
    assert any(each.startswith(f"{card.gpu.name}, ") for each in notes) == (is_here and bool(note))
    # It is measured there, and leaves no room beyond its own; a prediction of it does.
    assert problem.backend == ("cuda" if is_here else None)
    assert (problem.workload.headroom == NO_HEADROOM) == is_here
    assert problem.predicted().backend is None
    assert problem.predicted().workload.headroom == USUAL_HEADROOM
    on_two = resolve(dataclasses.replace(QUESTION, gpu=None, gpu_mem=None, num_gpus=2))
    assert on_two.backend is None


@pytest.mark.parametrize(
    ("asked", "spare", "said"),
    [
        ({}, 0, None),
        ({"headroom": "1GiB"}, 2**30, None),
        ({"headroom": "1GiB"}, 2**30 - 2**28, "0.25 GiB of the room that --headroom 1GiB asks for"),
        (
            {"headroom": "1GiB"},
            0,
            "1.00 GiB of the room that --headroom 1GiB asks for are lacking.",
        ),
        # What does not fit is said elsewhere.
        ({"headroom": "1GiB"}, -1, None),
        ({"odds": 0.9}, 0, "of the room that --odds 0.9 asks for are lacking."),
    ],
)
def test_room_that_lacks_is_said_where_it_was_asked_for(
    asked: dict[str, Any], spare: int, said: str | None
) -> None:
    question = dataclasses.replace(QUESTION, **asked)
    estimate = answers.estimate()
    budget_bytes = estimate.resident_bytes + spare
    workload = dataclasses.replace(
        answers.WORKLOAD,
        memory_budget_bytes=budget_bytes,
        headroom=budget.headroom_of(question, budget_bytes),
    )
    pricing: Any = SimpleNamespace(estimate=estimate, asked=SimpleNamespace(workload=workload))
    notes: list[str] = []
    estimate_module.note_room(question, pricing, notes.append)
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize(
    ("asked", "found", "is_said"),
    [
        (SOLVE, {"activation_checkpointing": 1}, True),
        (SOLVE, {"activation_checkpointing": 0}, False),
        (SOLVE, {"checkpoint_plan": "recompute", "checkpoint_layers": 6}, False),
        (1, {"activation_checkpointing": 1}, False),
    ],
)
def test_where_no_plan_fits_that_is_said(asked: int, found: dict[str, Any], is_said: bool) -> None:
    config = dataclasses.replace(answers.estimate().config, activation_checkpointing=1)
    of_asked: Any = SimpleNamespace(
        config=dataclasses.replace(config, activation_checkpointing=asked)
    )
    solved = dataclasses.replace(config, **found)
    pricing: Any = SimpleNamespace(asked=SimpleNamespace(config=solved))
    notes: list[str] = []
    estimate_module.note_unsolved(of_asked, pricing, notes.append)
    assert any("no plan that fits" in note for note in notes) == is_said


@pytest.mark.parametrize(
    ("rank", "width", "is_said"),
    [(65, 64, True), (64, 64, False), (8, 0, False), (None, 64, False)],
)
def test_a_rank_that_adds_nothing_to_a_layer_is_noted(
    rank: int | None, width: int, is_said: bool
) -> None:
    notes: list[str] = []
    config = dataclasses.replace(answers.estimate().config, lora_rank=rank)
    estimate_module.note_rank(config, width, notes.append)
    assert any("64 inputs or outputs: rank 65 adds nothing" in note for note in notes) == is_said


def test_what_cannot_work_is_refused() -> None:
    asked = dataclasses.replace(QUESTION, settings={"activation_offloading": True})
    with pytest.raises(ConfigError, match="This configuration"):
        resolve_configuration(asked)


@pytest.mark.parametrize("ask", [resolve, resolve_configuration])
def test_an_option_of_a_dataset_is_not_left_out_in_silence(ask: Callable[..., Any]) -> None:
    notes: list[str] = []
    ask(
        dataclasses.replace(QUESTION, accumulation=1, loss_on="all", tokenizer="here"),
        note=notes.append,
    )
    assert notes == [
        "without --dataset nothing is read, which is all that --loss-on and --tokenizer would change."
    ]


@pytest.mark.parametrize("dataset", [None, "rows.jsonl"])
def test_a_search_says_that_it_reads_a_dataset(
    dataset: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tokens take seconds to count."""
    said: list[str] = []

    def stop(*_: object, **__: object) -> None:
        said.append("read")
        raise ConfigError("stop")

    monkeypatch.setattr(find_module, "resolve", stop)
    showing = contextlib.nullcontext(lambda what, *_: said.append(what))
    listener = dataclasses.replace(SILENT, searching=lambda: showing)
    asked = dataclasses.replace(QUESTION, accumulation=1, dataset=dataset)
    storage = f"sqlite:///{tmp_path}/autotune.db"
    with pytest.raises(ConfigError, match="stop"):
        find_module.find(asked, storage=storage, listener=listener)
    assert said == (["read"] if dataset is None else ["dataset", "read"])


def test_a_length_that_was_asked_for_is_refused_where_the_model_ends_before() -> None:
    gpt2 = dataclasses.replace(QUESTION, model="openai-community/gpt2")
    assert resolve_configuration(gpt2).config.sequence_length == 1024
    with pytest.raises(ConfigError, match=r"1,?024"):
        resolve_configuration(dataclasses.replace(gpt2, seq_len=2048))
    bert = dataclasses.replace(QUESTION, model="google-bert/bert-base-uncased")
    assert resolve_configuration(bert).config.sequence_length == 512


def test_in_wsl_no_shipped_space_expands_segments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def values(space: str) -> set[Any]:
        question = Question(model="Qwen/Qwen2.5-0.5B", gpu="rtx-4090", space=space)
        sections = resolve(question).space.methods
        return {value for each in sections for value in each.domains.get("expandable_segments", ())}

    own = tmp_path / "own.yaml"
    own.write_text(Path("search_spaces/default.yaml").read_text("utf-8"), encoding="utf-8")
    assert values("default") == values(str(own)) == {False, True}
    monkeypatch.setattr(host_memory, "in_wsl", lambda: True)
    assert values("default") == {False}
    assert values(str(own)) == {False, True}


@pytest.mark.parametrize(
    ("batch", "num_gpus", "sizes"),
    [
        (32, 1, [1, 2, 4, 8, 16, 32]),
        (128, 1, [1, 2, 4, 8, 16, 32]),
        (3, 1, [1, 2, 3, 4, 8, 16, 32]),
        (24, 1, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]),
        (24, 3, [1, 2, 4, 8, 16, 32]),
        (37, 1, [1, 2, 4, 8, 16, 32]),
        (1000, 1, [1, 2, 4, 5, 8, 10, 16, 20, 25, 32]),
    ],
)
def test_micro_batches_divide_the_effective_batch(
    batch: int, num_gpus: int, sizes: list[int]
) -> None:
    question = Question(
        model="Qwen/Qwen2.5-0.5B", gpu="rtx-4090", effective_batch=batch, num_gpus=num_gpus
    )
    problem = resolve(question)
    for section in problem.space.methods:
        assert list(section.domains["micro_batch_size"]) == sizes
    is_said = [change for change in problem.changes if "effective batch" in change.why]
    assert bool(is_said) == (sizes != [1, 2, 4, 8, 16, 32])


def test_micro_batches_of_a_space_of_ones_own_are_as_it_lists_them(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "name: own\ndescription: d\nmethods:\n  lora:\n    micro_batch_size: [1, 2]\n"
        "    lora_rank: [8]\n    lora_targets: [attention]\n"
        "    precision: [bf16-autocast]\n    optimizer: [adamw_torch]\n"
    )
    question = Question(
        model="Qwen/Qwen2.5-0.5B", gpu="rtx-4090", effective_batch=9, space=str(own)
    )
    assert resolve(question).space.methods[0].domains["micro_batch_size"] == (1, 2)


def notes_of(**question: Any) -> str:
    notes: list[str] = []
    resolve(Question(**question), note=notes.append)
    return " ".join(notes)


def test_a_card_without_bfloat16_is_said_to_train_in_float16() -> None:
    def notes_on(card: str, model: str = "Qwen/Qwen2.5-0.5B") -> str:
        return notes_of(model=model, gpu=card)

    assert "T4 has no bfloat16" in notes_on("t4")
    assert "float16 with loss scaling is searched instead" in notes_on("t4")
    assert "bfloat16" not in notes_on("rtx-4090")
    # Which PyTorch has kernels for it, and whose memory it is, follow from the card alone.
    for card in ("p100", "v100"):
        assert "PyTorch's builds for CUDA 13 have no kernels for it" in notes_on(card)
    assert "CUDA 13" not in notes_on("t4")
    assert "Its memory is the host's, too" in notes_on("gb10")
    # Its checkpoint is in float32.
    assert "bfloat16" not in notes_on("t4", "google-bert/bert-base-uncased")
    assert "may leave float16's range" in notes_on("t4", "google-t5/t5-base")
    assert "float16" not in notes_on("rtx-4090", "google-t5/t5-base")


@pytest.mark.parametrize(("length", "is_told"), [(32_768, False), (32_769, True)])
def test_a_context_beyond_the_models_own_is_warned_of(length: int, is_told: bool) -> None:
    """Qwen2.5-0.5B: max_position_embeddings 32768."""
    asked = dataclasses.replace(QUESTION, seq_len=length)
    for ask in (resolve, resolve_configuration):
        notes: list[str] = []
        ask(asked, note=notes.append)
        assert any("32,768 positions" in note for note in notes) == is_told


@pytest.mark.parametrize("ask", [resolve, resolve_configuration])
def test_a_context_that_no_sample_of_a_dataset_fills_is_not_warned_of(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset(name="a.txt", format="text", loss_on="all", text_field="text", tokenizer="mine")
    lengths = Lengths.of({900: 3}, 40_000, num_samples=3, longest=900)
    monkeypatch.setattr(resolve_module, "read_dataset", lambda *_, **__: (data, lengths))
    settings = {} if ask is resolve else {"batching": "padded"}
    asked = dataclasses.replace(QUESTION, seq_len=40_000, dataset="a.txt", settings=settings)
    notes: list[str] = []
    monkeypatch.setattr(resolve_module, "may_pack", lambda *_: False)
    assert ask(asked, note=notes.append).workload.sequence_length == 900
    assert notes == ["no sample has more than 900 tokens: that is the sequence length."]


def test_that_the_hubs_cache_was_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--Qwen--Qwen2.5-0.5B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    config = models.resolve("Qwen/Qwen2.5-0.5B").config | {"num_hidden_layers": 3}
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    notes: list[str] = []
    found = resolve(Question(model="Qwen/Qwen2.5-0.5B", gpu_mem="8GB"), note=notes.append)
    assert found.source.num_layers == 3
    said = "is that of the Hub's cache, which differs from the catalogue's (num_hidden_layers)."
    assert any(note.endswith(said) for note in notes)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_three_keys_that_differ_are_named(number: int) -> None:
    source: Any = SimpleNamespace(short_name="m", differs_in=tuple("abcd"[:number]))
    notes: list[str] = []
    resolve_module._note_cached(source, notes.append)
    (note,) = notes
    assert note.endswith(f"({', '.join('abcd'[: min(number, 3)])}{', ...' * (number == 4)}).")


def test_completions_are_as_long_as_typed_or_the_base_or_the_trainer_has_them() -> None:
    base = dataclasses.replace(answers.CONFIG, trainer="trl-grpo", max_completion_length=48)
    usual = TRAINERS["trl-grpo"].generates
    assert usual is not None
    asked = dataclasses.replace(QUESTION, settings={"max_completion_length": 32})
    for question, of_base, length in (
        (asked, base, 32),
        (QUESTION, base, 48),
        (asked, None, 32),
        (QUESTION, None, usual.max_completion_length),
    ):
        assert resolve_module._completion(question, "grpo", 4096, of_base) == length
    assert resolve_module._completion(QUESTION, "causal-lm", 4096, None) == 0


def test_that_lora_leaves_out_proj_out_of_mamba_is_said(tmp_path: Path) -> None:
    file = tmp_path / "mamba.json"
    file.write_text('{"model_type": "mamba", "num_hidden_layers": 2, "vocab_size": 100}')
    asked = Question(model=str(file), gpu_mem="8GB", seq_len=64)
    said = "LoRA leaves out_proj out: PEFT adapts none in models of type mamba."
    for question, is_said in (
        (asked, True),
        (dataclasses.replace(asked, methods=("full",)), False),
    ):
        notes: list[str] = []
        resolve(question, note=notes.append)
        assert (said in notes) is is_said


@pytest.mark.parametrize(
    ("methods", "study"),
    [((), "gpt-oss-20b-80gb"), (("lora",), "gpt-oss-20b-80gb-lora")],
)
def test_a_study_is_named_by_the_methods_that_were_asked_for(
    methods: tuple[str, ...], study: str
) -> None:
    """Its checkpoint is quantised already: qlora is left out by itself."""
    question = Question(model="openai/gpt-oss-20b", gpu_mem="80GB", methods=methods)
    notes: list[str] = []
    problem = resolve(question, note=notes.append)
    assert "is unpacked into 16 bits as it is loaded (Mxfp4Config)" in notes[0]
    assert "qlora" not in problem.workload.methods
    assert problem.study == study


def test_padding_counts_where_there_is_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(estimate_module, "trace_all", lambda *_, **__: {})
    monkeypatch.setattr(estimate_module, "Estimator", lambda *_, **options: made.append(options))
    asked = resolve_configuration(
        dataclasses.replace(QUESTION, settings={"batching": "padded", "micro_batch_size": 4})
    )
    varied = Lengths.of({512: 1, 1024: 1}, 1024, num_samples=2, longest=1024)
    for lengths in (None, varied):
        workload = dataclasses.replace(asked.workload, lengths=lengths)
        estimate_module.priced(dataclasses.replace(asked, workload=workload))
    unfilled, filling = (options["filling"] for options in made)
    assert unfilled is None
    assert filling(asked.config) == workload.filling(asked.config)
    assert filling(asked.config).useful_share < 1


@pytest.mark.parametrize("task", [None, "causal-lm", PICTURES])
def test_a_base_of_another_trainer_trains_on_no_pictures(task: str | None, tmp_path: Path) -> None:
    base = tmp_path / "axolotl.yaml"
    base.write_text("base_model: Qwen/Qwen2.5-0.5B\nsequence_len: 512\n", encoding="utf-8")
    asked = Question(base=base, gpu="rtx-4090", task=task)
    if task != PICTURES:
        assert resolve(asked).workload.sequence_length == 512
        return
    with pytest.raises(ConfigError, match=f"cannot be a base of the task {PICTURES}"):
        resolve(asked)
