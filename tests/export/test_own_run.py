from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autotune.export import ALL, EXPORTERS, export_paths
from autotune.export.base import own_run
from autotune.export.base.read import BaseRun, model_in, read_base
from autotune.export.mapping_write import unsaid
from autotune.space import space_file
from autotune.space.config import TrainConfig, Workload
from autotune.space.enumeration import enumerate_configs
from autotune.space.search_space import as_in_base

FILES = Path(__file__).parents[1] / "data" / "bases"
QUICK = Workload(model="m", memory_budget_bytes=1, sequence_length=2048, effective_batch_size=16)


def read(name: str, **given: int) -> tuple[BaseRun, list[str]]:
    notes: list[str] = []
    options = {"seq_len": None, "num_gpus": 1, "effective_batch": 32, "has_bf16": True, **given}
    run = own_run.read_run(FILES / name, **options, usual_length=1024, note=notes.append)  # type: ignore[arg-type]
    return run, notes


def test_gpus_are_those_that_were_named() -> None:
    config = read("axolotl.yaml", num_gpus=4)[0].config
    assert (config.num_gpus, config.parallelism) == (4, "ddp")
    # Batches are per GPU in a file.
    assert config.effective_batch_size == 2 * 8 * 4


def test_what_is_left_to_the_card_is_float16_on_an_old_one() -> None:
    assert read("axolotl.yaml")[0].config.precision == "bf16-autocast"
    assert read("axolotl.yaml", has_bf16=False)[0].config.precision == "fp16-autocast"
    # That file says bfloat16.
    assert read("llama_factory.yaml", has_bf16=False)[0].config.precision == "bf16-autocast"


def test_a_method_that_the_file_leaves_open_is_searched() -> None:
    run, _ = read("training_arguments.yaml")
    space, _ = own_run.searched(
        space_file.load("default"), run, run.config, "causal-lm", has_lengths=False
    )
    assert [section.method for section in space.methods] == ["full", "lora", "qlora"]
    # But attention is not, which the file says nothing of either.
    assert {section.domains["attention"] for section in space.methods} == {("sdpa",)}


def test_a_length_that_no_file_has_is_said() -> None:
    run, notes = read("training_arguments.yaml")
    assert run.config.sequence_length == 1024
    assert any("--seq-len 1024 is assumed" in note for note in notes)
    run, notes = read("training_arguments.yaml", seq_len=4096)
    assert run.config.sequence_length == 4096
    assert not any("--seq-len" in note for note in notes)


@pytest.mark.parametrize(
    "name", ["axolotl.yaml", "llama_factory.yaml", "sft.yaml", "training_arguments.yaml"]
)
@pytest.mark.parametrize("space", ["default", "everything"])
def test_a_search_has_only_what_the_file_can_say_and_the_base_is_in_it(
    name: str, space: str
) -> None:
    run, _ = read(name)
    assert run.target is not None
    searched, base = own_run.searched(
        space_file.load(space), run, run.config, "causal-lm", has_lengths=False
    )
    assert base.batching == run.config.batching  # as the file fills its batches
    workload = dataclasses.replace(
        QUICK,
        sequence_length=base.sequence_length,
        effective_batch_size=base.effective_batch_size,
        methods=(base.method,),
    )
    of_base = {
        domain: getattr(base, domain)
        for section in searched.methods
        if section.method == base.method
        for domain, values in section.domains.items()
        if getattr(base, domain) not in values
    }
    assert of_base == {}
    if space == "default":
        points = enumerate_configs(searched, workload).configs
        assert {unsaid(run.target, config) for config in points} == {()}
        assert len(points) > 50


def test_ours_is_searched_as_ever(tmp_path: Path) -> None:
    config = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=8,
        sequence_length=512,
        precision="fp32",
        optimizer="sgd",
    )
    run = BaseRun(path=tmp_path / "train_config.yaml", config=config)
    space = space_file.load("default")
    assert own_run.searched(space, run, config, "causal-lm", has_lengths=False) == (space, config)
    assert own_run.with_edited(EXPORTERS, tmp_path, run, config) == EXPORTERS
    assert own_run.changed(run, config, config) == []


def test_a_folder_of_ours_is_searched_around_its_own_dtype(tmp_path: Path) -> None:
    """Its train_config.yaml says the dtype of the weights, which other files leave to the checkpoint."""
    config = TrainConfig(
        method="full",
        micro_batch_size=4,
        gradient_accumulation_steps=8,
        sequence_length=512,
        precision="bf16-true",
        optimizer="adamw_torch_fused",
    )
    workload = dataclasses.replace(QUICK, model="google-bert/bert-base-uncased")  # In float32.
    for name in ("training-args", "train-config"):
        text = ALL[name].write(workload=workload, config=config, result={"evidence": "predicted"})
        (tmp_path / ALL[name].filename).write_text(text, encoding="utf-8")
    run = read_base(tmp_path)
    assert run.config == config
    space = space_file.load("default")
    (named,) = (section for section in space.methods if section.method == "full")
    searched, _ = own_run.searched(space, run, config, "masked-lm", has_lengths=False)
    (section,) = (section for section in searched.methods if section.method == "full")
    assert section.domains["precision"] == named.domains["precision"]


@pytest.mark.parametrize("space", ["default", "everything", "lora"])
def test_the_files_alpha_is_that_of_every_answer(space: str) -> None:
    """Nothing is to be gained by another, so none is tried: a full run's has none."""
    run, _ = read("axolotl.yaml")
    loaded = space_file.load(space)
    searched, _ = own_run.searched(
        as_in_base(loaded, run.config), run, run.config, "causal-lm", has_lengths=False
    )
    alphas = {
        section.method: section.domains["lora_alpha_ratio"]
        for section in searched.methods
        if "lora_alpha_ratio" in section.domains
    }
    assert alphas
    assert set(alphas.values()) == {(0.5,)}
    full, _ = read("training_arguments.yaml")
    assert as_in_base(loaded, full.config) == loaded


def test_a_space_that_names_alphas_keeps_them() -> None:
    run, _ = read("axolotl.yaml")
    space = space_file.load("lora")
    (section,) = (section for section in space.methods if section.method == "lora")
    named = dataclasses.replace(
        section, domains={**section.domains, "lora_alpha_ratio": (1.0, 2.0)}
    )
    space = dataclasses.replace(space, methods=(named,))
    assert as_in_base(space, run.config) == space


def test_theirs_is_never_written_over(tmp_path: Path) -> None:
    run, _ = read("axolotl.yaml")
    (*_, copy) = own_run.with_edited(EXPORTERS, tmp_path, run, run.config)
    assert copy.filename == "yours/axolotl.yaml"
    again = tmp_path / "yours" / "axolotl.yaml"
    again.parent.mkdir()
    again.write_bytes((FILES / "axolotl.yaml").read_bytes())
    run = read_base(again)
    (*_, copy) = own_run.with_edited(EXPORTERS, tmp_path, run, run.config)
    assert copy.filename == "yours/axolotl.answer.yaml"


@pytest.mark.parametrize("path", ["axolotl.yaml", "./axolotl.yaml", "{folder}/axolotl.yaml"])
@pytest.mark.parametrize("out", ["..", "../../theirs", "{folder}/.."])
def test_theirs_is_not_written_over_however_file_and_folder_are_named(
    path: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "theirs" / "yours"
    folder.mkdir(parents=True)
    theirs = (FILES / "axolotl.yaml").read_bytes()
    (folder / "axolotl.yaml").write_bytes(theirs)
    monkeypatch.chdir(folder)
    run = read_base(Path(path.format(folder=folder)))
    into = Path(out.format(folder=folder))
    written = own_run.with_edited(EXPORTERS, into, run, run.config)
    places = [path.resolve() for path in export_paths(into, written)]
    assert (folder / "axolotl.yaml").resolve() not in places
    assert (folder / "axolotl.answer.yaml").resolve() in places
    # And a link to the folder is the folder.
    (tmp_path / "link").symlink_to(folder.parent)
    written = own_run.with_edited(EXPORTERS, tmp_path / "link", run, run.config)
    assert written[-1].filename == "yours/axolotl.answer.yaml"


def test_ours_is_not_put_in_the_place_of_theirs(tmp_path: Path) -> None:
    path = tmp_path / "train_config.yaml"
    path.write_bytes((FILES / "axolotl.yaml").read_bytes())
    run = read_base(path)
    names = [each.filename for each in own_run.with_edited(EXPORTERS, tmp_path, run, run.config)]
    assert "train_config.yaml" not in names
    names = [
        each.filename for each in own_run.with_edited(EXPORTERS, tmp_path / "out", run, run.config)
    ]
    assert names == [*(each.filename for each in EXPORTERS), "yours/train_config.yaml"]


PROGRAM = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype="bfloat16")
Trainer(model, TrainingArguments(output_dir="out", bf16=True)).train()
"""


def test_a_train_py_of_theirs_stands_beside_ours_and_is_what_is_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    run = read_base(path)
    out = tmp_path / "my out"
    written = own_run.with_edited(EXPORTERS, out, run, run.config)
    assert [each.filename for each in written if each.filename.endswith(".py")] == [
        "train.py",
        "yours/train.py",
    ]
    assert own_run.command(run, out, run.config) == f"python '{out}/yours/train.py'"
    two = dataclasses.replace(run.config, num_gpus=2, parallelism="ddp")
    assert own_run.command(run, out, two).startswith("python -m torch.distributed.run --nproc")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("axolotl.yaml", "axolotl train out/yours/axolotl.yaml"),
        ("llama_factory.yaml", "llamafactory-cli train out/yours/llama_factory.yaml"),
        ("sft.yaml", "trl sft --config out/yours/sft.yaml"),
        ("training_arguments.yaml", ""),  # arguments alone train nothing: train.py does
    ],
)
def test_what_is_next_is_the_files_own_trainer(name: str, command: str) -> None:
    run, _ = read(name)
    assert own_run.command(run, Path("out"), run.config) == command


def test_a_way_of_batching_is_said_where_it_is_another_and_samples_have_lengths() -> None:
    run, _ = read("training_arguments.yaml")
    packed = dataclasses.replace(run.config, batching="packed")
    padded = dataclasses.replace(run.config, batching="padded")
    assert "not put into it: batching: padded batches." in own_run.changed(run, packed, padded)
    assert not any("batching" in line for line in own_run.changed(run, padded, padded))
    picture = dataclasses.replace(padded, sequence_length=1)
    assert not any("batching" in line for line in own_run.changed(run, picture, picture))


def test_what_was_changed_is_said() -> None:
    run, _ = read("axolotl.yaml")
    answer = dataclasses.replace(
        run.config, activation_checkpointing=2, precision="bf16-true", micro_batch_size=4
    )
    said = own_run.changed(run, run.config, answer)
    assert said == [
        "your axolotl.yaml is written into yours/, with micro_batch_size: 4.",
        "not put into it: precision: bf16-true.",
        "not put into it: activation_checkpointing: checkpoint every 2nd layer.",
    ]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("axolotl.yaml", "Qwen/Qwen2.5-1.5B"),
        ("llama_factory.yaml", "Qwen/Qwen2.5-1.5B"),
        ("sft.yaml", "Qwen/Qwen2.5-1.5B"),
        # TrainingArguments name none.
        ("training_arguments.yaml", None),
    ],
)
def test_the_model_of_a_file_is_the_one_it_names(name: str, model: str | None) -> None:
    assert model_in(FILES / name, method="lora", task="causal-lm") == model
