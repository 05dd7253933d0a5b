"""Files of TRL's trainers of preferences and rewards, read as a base without being told what they train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from loaders import declared, needs

from autotune.errors import ConfigError
from autotune.export import ALL, llama_factory, train_trl_py, trl_config
from autotune.export.base import huggingface, own_run
from autotune.export.base.read import changes, read_base
from autotune.space import space_file
from autotune.space.config import TrainConfig, Workload
from autotune.space.teacher import Teacher
from autotune.space.trainers import BY_TASK, TRL_BY_TASK, Trainer

pytest.importorskip("trl")

FULL = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=768,
    precision="bf16-true",
    optimizer="adamw_8bit",
    batching="padded",
)
QLORA = dataclasses.replace(
    FULL,
    method="qlora",
    micro_batch_size=2,
    gradient_accumulation_steps=16,
    quantization="nf4",
    precision="bf16-autocast",
    lora_rank=16,
    lora_targets="all-linear",
    activation_checkpointing=1,
)
TEACHER = "Qwen/Qwen2.5-7B"
EXPORTERS = {
    task: (
        next(each for each in trl_config.EXPORTERS if each.name == row.command),
        train_trl_py.EXPORTERS[row.command],
    )
    for task, row in TRL_BY_TASK.items()
}


def written(folder: Path, task: str, number: int, config: TrainConfig) -> Path:
    exporter = EXPORTERS[task][number]
    workload = Workload(
        model="Qwen/Qwen2.5-1.5B",
        task=task,
        memory_budget_bytes=12 * 10**9,
        teacher=Teacher(name=TEACHER, config_json="{}") if TRL_BY_TASK[task].has_teacher else None,
    )
    path = folder / exporter.filename
    text = exporter.write(workload=workload, config=config, result={"evidence": "predicted"})
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("number", [0, 1], ids=["yaml", "program"])
@pytest.mark.parametrize("base", [FULL, QLORA], ids=["full", "qlora"])
@pytest.mark.parametrize("task", TRL_BY_TASK)
def test_what_is_written_is_read(tmp_path: Path, task: str, base: TrainConfig, number: int) -> None:
    config = of_task(base, task)
    path = written(tmp_path, task, number, config)
    if (task, base, number) == ("reward", FULL, 0):
        # Nothing in it is not in SFTConfig, too.
        assert read_base(path).config.trainer == "trl-sft"
        assert read_base(path, task="reward").config == config
        return
    asked = (
        "rloo" if (task, number) == ("rloo", 0) else None
    )  # as all of its keys are GRPOConfig's, too
    run = read_base(path, task=asked, sequence_length=768)
    assert run.config == config
    assert run.teacher == (TEACHER if TRL_BY_TASK[task].has_teacher else None)


def of_task(config: TrainConfig, task: str) -> TrainConfig:
    completions = {"num_generations": 4, "max_completion_length": 256, "kl_beta": 0.04}
    more = completions if TRL_BY_TASK[task].generates is not None else {}
    if TRL_BY_TASK[task].has_teacher:
        more = {**completions, "num_generations": 1, "kl_beta": 0.0}
    return dataclasses.replace(config, trainer=TRL_BY_TASK[task].name, **more)


@pytest.mark.parametrize("task", ["dpo", "kto", "grpo", "sentence-similarity"])
@pytest.mark.parametrize("name", ["peft", "training-args"])
def test_what_says_nothing_of_a_trainer_has_that_of_the_task(
    tmp_path: Path, name: str, task: str
) -> None:
    row = BY_TASK[task]
    config = dataclasses.replace(QLORA, method="lora", quantization="none")
    workload = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=12 * 10**9)
    path = tmp_path / "mine.json"
    path.write_text(ALL[name].write(workload=workload, config=config, result={}), encoding="utf-8")
    run = read_base(path, task=task, samples=32, method="lora", sequence_length=768)
    assert (run.config.trainer, run.config.batching) == (row.name, "padded")
    assert (run.config.num_generations, run.config.max_completion_length) == (
        (8, 512) if task == "grpo" else (None, None)
    )
    batch = (run.config.micro_batch_size, run.config.gradient_accumulation_steps)
    least = 32 if row.compares_all else row.least_micro_batch
    assert batch == ((2, 16) if name == "training-args" else (least, 32 // least))
    space, _ = own_run.searched(
        space_file.load("default"), run, run.config, task, has_lengths=False
    )
    offered = {each.method: each.domains for each in space.methods}["lora"]
    for setting in ("trainer", "batching", "num_generations", "max_completion_length"):
        assert getattr(run.config, setting) in offered.get(setting, (None,))


def test_scores_from_before_are_read_and_written(tmp_path: Path) -> None:
    config = dataclasses.replace(FULL, trainer="trl-dpo", precompute_ref_log_probs=True)
    for number in (0, 1):
        run = read_base(written(tmp_path, "dpo", number, config))
        assert run.config == config
        answer = dataclasses.replace(config, precompute_ref_log_probs=False, micro_batch_size=2)
        text, _, left = run.parts[0].edited(changes(run, run.config, answer))
        assert left == []
        again = run.path.with_stem("again")
        again.write_text(text, encoding="utf-8")
        assert read_base(again).config == answer


def test_a_reward_model_gets_an_adapter_with_its_head(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text("model_name_or_path: a/b\ncenter_rewards_coefficient: 0.01\n", encoding="utf-8")
    run = read_base(path)
    assert run.config.trainer == "trl-reward"
    answer = dataclasses.replace(QLORA, trainer="trl-reward", sequence_length=1024)
    made = {change.key: change.value for change in changes(run, run.config, answer)}
    assert made["lora_task_type"] == "SEQ_CLS"


def test_dropout_that_is_switched_off_is_none(tmp_path: Path) -> None:
    config = dataclasses.replace(QLORA, trainer="trl-kto")
    for number in (0, 1):
        path = written(tmp_path, "kto", number, config)
        text = path.read_text(encoding="utf-8")
        text = text.replace("lora_dropout: 0.0", "lora_dropout: 0.1")
        text = text.replace("LoraConfig(\n", "LoraConfig(\n    lora_dropout=0.1,\n")
        assert "0.1" in text
        path.write_text(text, encoding="utf-8")
        assert read_base(path).config == config


@pytest.mark.parametrize("task", [None, "dpo"])
def test_older_names_of_trls_are_read_and_kept(task: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config_full.yaml"
    path.write_text(
        "model_name_or_path: a/b\ntorch_dtype: bfloat16\nbf16: true\nmax_seq_length: 2048\n",
        encoding="utf-8",
    )
    run = read_base(path, task=task)
    assert (run.config.precision, run.config.sequence_length) == ("bf16-autocast", 2048)
    assert run.notes == ()
    answer = dataclasses.replace(run.config, precision="bf16-mixed", sequence_length=512)
    text, _, left = run.parts[0].edited(changes(run, run.config, answer))
    assert left == []
    assert "torch_dtype: float32" in text
    assert "max_seq_length: 512" in text


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a/b\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\nrl: ipo\n",
        "model_name_or_path: a/b\nfinetuning_type: lora\nstage: dpo\npref_loss: hinge\n",
        "model_name_or_path: a/b\nfinetuning_type: lora\nstage: dpo\npref_loss: ipo\n",
    ],
)
def test_other_losses_of_pairs_are_those_of_dpo_and_stay(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(f"{text}bf16: true\n", encoding="utf-8")
    run = read_base(path)
    assert run.config.trainer == "trl-dpo"
    assert [note for note in run.notes if "takes the memory and time of DPO's usual loss" in note]
    answer = dataclasses.replace(run.config, micro_batch_size=4)
    edited, _, left = run.parts[0].edited(changes(run, run.config, answer))
    assert (edited.startswith(text), left) == (True, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("beta: 0.2", "DistillationConfig: say --task dpo or kto or grpo or rloo or distillation"),
        (
            "num_generations: 4",
            "num_generations is of GRPOConfig, RLOOConfig: say --task grpo or rloo",
        ),
        (
            "teacher_model_init_kwargs: {quantization_config: {load_in_4bit: true}}",
            "quantises the teacher",
        ),
        (
            "scale_rewards: none\nuse_vllm: true\nvllm_mode: server",
            "use_vllm with this vllm_mode is not predicted",
        ),
        ("teacher_model_name_or_path: a/b\nuse_vllm: true", "predicted for GRPO and RLOO alone"),
        ("scale_rewards: none\ngeneration_batch_size: 32", "say steps_per_generation"),
        ("loss_type: apo_zero_unpaired", "loss_type"),
        ("loss_type: [ipo]\nsync_ref_model: true", "sync_ref_model: changes the reference"),
    ],
)
def test_a_file_that_may_be_of_several_or_is_not_predicted(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"model_name_or_path: a/b\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_base(path)
    assert said in str(raised.value)


def test_the_task_that_is_asked_for_tells_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model_name_or_path: a/b\nbeta: 0.2\n", encoding="utf-8")
    for task, row in TRL_BY_TASK.items():
        read: Any = read_base(path, task=task)
        assert (read.config.trainer, read.config.batching) == (row.name, "padded")


@pytest.mark.parametrize(
    "trainer", [row for row in TRL_BY_TASK.values() if row.generates], ids=lambda row: row.name
)
def test_what_a_file_of_completions_leaves_out_is_as_trl_has_it(trainer: Trainer) -> None:
    files = ("base", "rloo" if "rloo" in trainer.name else "grpo")
    if trainer.has_teacher:
        files = ("base", "distillation")
    theirs = declared("trl", *(f"trainer/{name}_config.py" for name in files))
    ours = huggingface.defaults_of_task(trainer)
    assert ours
    # RLOO has no such weights.
    weighed = {name for name in ours if name.startswith("vllm_importance_sampling")}
    assert ours.keys() - theirs.keys() == (weighed if trainer.name == "trl-rloo" else set())
    assert {name: theirs.get(name, value) for name, value in ours.items()} == ours


def test_what_a_file_of_trl_leaves_out_is_as_trl_has_it() -> None:
    theirs = declared("trl", *(f"trainer/{name}_config.py" for name in ("base", "sft", "model")))
    theirs |= {"activation_checkpointing": theirs["gradient_checkpointing"]}
    # The attention that Transformers chooses, and the precision that TRL does, are not declared.
    ours = {**huggingface.SFT.defaults}
    for name in ("attn_implementation", "bf16", *huggingface.TRAINING_ARGUMENTS.defaults):
        del ours[name]
    assert len(ours) == 7
    assert {name: theirs[name] for name in ours} == ours


@needs("llamafactory")
def test_what_a_file_of_llama_factory_leaves_out_is_as_it_has_it() -> None:
    theirs = declared(
        "llamafactory", *(f"hparams/{n}_args.py" for n in ("model", "finetuning", "data"))
    )
    ours = {
        name: value
        for name, value in llama_factory.TARGET.defaults.items()
        if name not in huggingface.TRAINING_ARGUMENTS.defaults
    }
    assert len(ours) == 9
    theirs |= {"quantization_method": "bnb", "flash_attn": "auto"}  # of enumerations of its own
    assert {name: theirs[name] for name in ours} == ours
    assert llama_factory.DPO.defaults["pref_loss"] == theirs["pref_loss"]


@pytest.mark.parametrize("task", TRL_BY_TASK)
def test_a_program_asks_for_rewards_where_its_trainer_is_rewarded(
    task: str, tmp_path: Path
) -> None:
    """And makes prompts of the samples where the model writes."""
    row = TRL_BY_TASK[task]
    config = dataclasses.replace(FULL, trainer=row.name)
    if row.generates is not None:
        config = dataclasses.replace(
            config, num_generations=row.generates.num_generations, max_completion_length=256
        )
    text = written(tmp_path, task, 1, config).read_text(encoding="utf-8")
    assert ("--reward FILE.py:FUNCTION" in text) is row.is_rewarded
    assert ("reward_funcs=rewards" in text) is row.is_rewarded
    assert ("teacher_model=teacher" in text) is row.has_teacher
    # Prompts have what completions leave of a sequence of 768 tokens.
    assert ("512" in text) is (row.generates is not None)
