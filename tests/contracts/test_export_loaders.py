"""Each exported file goes through its target's own loader, and a tiny model trains from it.

One child, forked from a process that has imported Trainer, loads and trains all of it. About 7 s on
two cores. torchtune and Unsloth do not import here: test_export_torchtune.py, test_export_formats.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from test_export_trains import ADAPTERS, FULL, LORA, QLORA, make_models, run_python

from autotune import export
from autotune.export.base.read import read_base
from autotune.space.config import TrainConfig, Workload
from autotune.space.teacher import Teacher
from autotune.space.trainers import FIXED_BY_A_TEACHER, TRAINERS, TRL_BY_TASK

pytest.importorskip("trl")

pytestmark = pytest.mark.slow

DORA = dataclasses.replace(QLORA, lora_variant="dora")
RSLORA = dataclasses.replace(
    LORA,
    lora_variant="rslora",
    lora_targets="attention",
    attention="eager",
    activation_checkpointing=1,
    checkpoint_plan="products",
    checkpoint_layers=3,
)
HALF = dataclasses.replace(
    FULL,
    precision="bf16-true",
    optimizer="adafactor",
    update_in_backward=True,
    gradient_accumulation_steps=1,
    activation_checkpointing=2,
    attention="sdpa_expanded",
)
GROUPED = dataclasses.replace(FULL, batching="grouped", torch_compile="max-autotune")
NOISY = dataclasses.replace(FULL, neftune_noise_alpha=5.0, torch_empty_cache_steps=3)
GALORE = dataclasses.replace(FULL, optimizer="galore_adamw")
INT8 = dataclasses.replace(QLORA, quantization="int8")
PADDED = dataclasses.replace(FULL, batching="padded", activation_checkpointing=1)
PADDED_LORA = dataclasses.replace(LORA, batching="padded", activation_checkpointing=0)
OF_TASKS = {
    "dpo": dataclasses.replace(PADDED, trainer="trl-dpo"),
    "dpo-lora": dataclasses.replace(PADDED_LORA, trainer="trl-dpo", precompute_ref_log_probs=True),
    "reward": dataclasses.replace(PADDED, trainer="trl-reward"),
    "reward-qlora": dataclasses.replace(QLORA, batching="padded", trainer="trl-reward"),
    "kto": dataclasses.replace(PADDED, trainer="trl-kto"),
    "kto-lora": dataclasses.replace(PADDED_LORA, trainer="trl-kto"),
}
OF_COMPLETIONS = [row.command for row in TRL_BY_TASK.values() if row.generates is not None]
"""Commands of TRL whose trainers write what they train on."""
CONFIGS = {
    "full": FULL,
    "half": HALF,
    "grouped": GROUPED,
    "noisy": NOISY,
    "galore": GALORE,
    "lora": LORA,
    "rslora": RSLORA,
    "qlora": QLORA,
    "dora": DORA,
    "int8": INT8,
    "fp4": dataclasses.replace(QLORA, quantization="fp4"),
    **OF_TASKS,
    **{f"adapter {name}": config for name, config in ADAPTERS.items()},
}
ADAPTERS_ONLY = [name for name in CONFIGS if name.startswith("adapter ")]
OF_ADAPTERS = [export.ALL["peft"]]
TRAINED = ("full", "half", "rslora", "qlora")
"""With TRL, in YAML and in Python. Other configurations are loaded."""

CHILD = """
import contextlib, dataclasses, io, json, os, runpy, sys, traceback, warnings
from pathlib import Path
import torch, transformers, yaml
from peft import PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
import importlib
import trl
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
from trl.scripts.sft import main as trl_sft

torch.set_num_threads(1)  # more would wait for each other: the models are tiny
folder, model, trained = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
own = {command: (getattr(trl, trainer), getattr(trl, config), data)
       for command, trainer, config, data in json.loads(sys.argv[4])}
os.chdir(folder)
os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")

# bf16 is refused without a GPU unless the arguments say that there is none.
real_check = TrainingArguments.__post_init__
def on_the_cpu(self):
    self.use_cpu = True
    real_check(self)
TrainingArguments.__post_init__ = on_the_cpu

def simple(values):
    return {key: value for key, value in values.items() if not key.startswith("_")
            and isinstance(value, (str, int, float, bool, list, dict, type(None)))}

def of_trl(path, *arguments, kind=SFTConfig):
    parser = TrlParser((ScriptArguments, kind, ModelConfig, DatasetMixtureConfig))
    # Unknown keys are an error here.
    return parser.parse_args_and_config(["--config", str(path), *arguments])

def peft(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of keys that PEFT does not know
        return PeftConfig.from_pretrained(str(path.parent))

def bitsandbytes(path):
    config = BitsAndBytesConfig.from_dict(json.loads(path.read_text()))
    return {**config.to_dict(), "compute": str(config.bnb_4bit_compute_dtype)}

def python(path):
    values = runpy.run_path(str(path))
    return {
        name: simple(made.to_dict() if name == "quantization" else vars(made))
        for name in ("arguments", "adapter", "quantization")
        if (made := values.get(name)) is not None
    }

LOADERS = {
    "training_args.json": lambda path: vars(TrainingArguments(**json.loads(path.read_text()))),
    "training_args.yaml": lambda path: vars(
        HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))[0]),
    "training_args.py": lambda path: python(path)["arguments"],
    "sft_config.yaml": lambda path: {
        key: value for made in of_trl(path) for key, value in vars(made).items()},
    "train_sft.py": python,
    **{f"{command}_config.yaml": lambda path, kind=kind: {
        key: value for made in of_trl(path, kind=kind) for key, value in vars(made).items()}
       for command, (_, kind, _) in own.items()},
    **{f"train_{command}.py": python for command in own},
    "adapter_config.json": lambda path: {**vars(peft(path)), "class": type(peft(path)).__name__},
    "quantization_config.json": bitsandbytes,
}

def plain(value):
    if isinstance(value, set):
        return sorted(value)
    return value.value if hasattr(value, "value") else str(value)

def attempt(work):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return work()
    except BaseException:
        return {"problem": traceback.format_exc()}

def with_trainer(path):
    arguments = dataclasses.replace(
        runpy.run_path(str(path))["arguments"], max_steps=2, save_strategy="no")
    rows = [{"input_ids": list(range(4, 20)), "labels": list(range(4, 20))}] * 8
    trainer = transformers.Trainer(
        AutoModelForCausalLM.from_pretrained(model), arguments, train_dataset=rows)
    return {"loss": trainer.train().training_loss, "steps": trainer.state.global_step}

def with_trl(work, kind=trl.SFTTrainer):
    seen = []
    real = kind.train
    def train(self, *arguments, **named):
        outcome = real(self, *arguments, **named)
        seen.append({"loss": outcome.training_loss, "steps": self.state.global_step,
                     "batch": list(self.get_train_dataloader().batch_sampler)[0],
                     "length": self.data_collator([self.train_dataset[0]])["input_ids"].shape[1],
                     "reference": getattr(self, "ref_model", None) is not None,
                     "dtype": str(next(self.model.parameters()).dtype),
                     "trainable": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
                     "planned": sum("forward" in vars(m) for m in self.model.modules()
                                    if isinstance(m, GradientCheckpointingLayer)),
                     "checkpointing": self.model.is_gradient_checkpointing})
        return outcome
    kind.train = train
    try:
        work()
    finally:
        kind.train = real
    return seen[0]

def run_program(path, rows="data/rows.jsonl"):
    sys.argv = [str(path), str(folder / rows)]
    runpy.run_path(str(path), run_name="__main__")

def refused(path):
    try:
        run_program(path, "none.jsonl")
    except SystemExit as end:
        return {"said": str(end)}

def with_adapter(of):
    quantization = BitsAndBytesConfig(**json.loads((of / "quantization_config.json").read_text()))
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=quantization)
    made = get_peft_model(base, PeftConfig.from_pretrained(str(of)))
    return {"trainable": made.get_nb_trainable_parameters()[0],
            "layers": sorted({type(module).__name__ for module in base.modules()})}

report = {}
for of in sorted(path for path in folder.iterdir() if (path / "exports").is_dir()):
    name, exports = of.name, of / "exports"
    paths = [*of.glob("*.json"), *of.glob("train_*.py"), *exports.iterdir()]
    report[name] = {
        path.name: attempt(lambda: LOADERS[path.name](path)) for path in paths if path.name in LOADERS}
    if name in trained:
        report[name]["trl yaml"] = attempt(lambda: with_trl(lambda: trl_sft(*of_trl(
            exports / "sft_config.yaml", "--dataset_name", str(folder / "data"), "--max_steps", "2",
            "--save_strategy", "no", "--output_dir", str(of / "yaml")))))
        report[name]["trl python"] = attempt(
            lambda: with_trl(lambda: run_program(exports / "train_sft.py")))
    for command, (trainer, config, data) in own.items():
        if not (of / f"train_{command}.py").exists():
            continue
        script = importlib.import_module(f"trl.scripts.{command}").main
        report[name]["trl yaml"] = attempt(lambda: with_trl(lambda: script(*of_trl(
            exports / f"{command}_config.yaml", "--dataset_name", str(folder / data), "--max_steps", "2",
            "--save_strategy", "no", "--output_dir", str(of / "yaml"), kind=config)), trainer))
        report[name]["trl python"] = attempt(lambda: with_trl(
            lambda: run_program(of / f"train_{command}.py", f"{data}/rows.jsonl"), trainer))
        report[name]["no file"] = attempt(lambda: refused(of / f"train_{command}.py"))
report["half"]["trainer"] = attempt(lambda: with_trainer(folder / "half" / "exports" / "training_args.py"))
report["dora"]["peft"] = attempt(lambda: with_adapter(folder / "dora" / "exports"))
(folder / "report.json").write_text(json.dumps(report, default=plain))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the child saw: configuration, file or run -> values, or a `problem`."""
    models = tmp_path_factory.mktemp("models")
    make_models(models)
    folder = tmp_path_factory.mktemp("exports")
    (folder / "data").mkdir()
    # 8 blocks of 16 tokens: two optimizer steps of 2 x 2.
    row = json.dumps({"text": " ".join(f"w{number}" for number in range(15))})
    (folder / "data" / "rows.jsonl").write_text(f"{row}\n" * 8)
    prompt, good, bad = (" ".join(f"w{number}" for number in range(n)) + " " for n in (4, 11, 8))
    pair = {"prompt": prompt, "chosen": good, "rejected": bad}
    labelled = [
        {"prompt": prompt, "completion": answer, "label": label}
        for answer, label in ((good, True), (bad, False))
    ]
    for name, samples in (("pairs", 8 * [pair]), ("labelled", 4 * labelled)):
        (folder / name).mkdir()
        lines = (json.dumps(sample) + "\n" for sample in samples)
        (folder / name / "rows.jsonl").write_text("".join(lines))
    for name, config in CONFIGS.items():
        task = TRAINERS[config.trainer].task or "causal-lm"
        export.export_files(
            folder / name,
            workload=Workload(model=str(models / "llama"), task=task, memory_budget_bytes=10**9),
            config=config,
            result={"evidence": "predicted"},
            exporters=OF_ADAPTERS if name in ADAPTERS_ONLY else None,
        )
    own = [
        (
            row.command,
            row.class_name,
            row.arguments_class,
            "labelled" if row.rows_per_sample == 1 else "pairs",
        )
        for row in TRL_BY_TASK.values()
        if row.generates is None  # what writes completions wants rewards: test_find_preferences.py
    ]
    run_python(CHILD, str(folder), str(models / "llama"), ",".join(TRAINED), json.dumps(own))
    values: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return values


def of(report: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    values: dict[str, Any] = report[name][what]
    assert values.get("problem", "") == ""
    return values


ARGUMENTS = {
    "full": {"optim": "adamw_torch_fused", "bf16": False, "activation_checkpointing": False},
    "half": {
        "optim": "adafactor",
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
    "grouped": {
        "train_sampling_strategy": "group_by_length",
        "torch_compile_mode": "max-autotune",
    },
    "noisy": {"neftune_noise_alpha": 5.0, "torch_empty_cache_steps": 3},
    "galore": {"optim_target_modules": "all-linear"},
    "lora": {"bf16": True, "activation_checkpointing": True},
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(
    "file",
    ["training_args.json", "training_args.yaml", "training_args.py", "sft_config.yaml"],
)
def test_training_arguments_are_loaded(report: dict[str, Any], file: str, name: str) -> None:
    values = of(report, name, file)
    expected = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": CONFIGS[name].gradient_accumulation_steps,
        **ARGUMENTS[name],
    }
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in (*ADAPTERS_ONLY, *OF_TASKS)])
def test_what_sft_config_loads(report: dict[str, Any], name: str) -> None:
    config = CONFIGS[name]
    values = of(report, name, "sft_config.yaml")
    python = of(report, name, "train_sft.py")
    assert values["max_length"] == python["arguments"]["max_length"] == 16
    assert values["packing"] is python["arguments"]["packing"] is (config.batching == "packed")
    assert values["use_peft"] is (config.method != "full")
    # A program lets Transformers know that attention; a file cannot.
    named = "sdpa" if config.attention == "sdpa_expanded" else config.attention
    assert values["attn_implementation"] == named
    loading = python["arguments"]["model_init_kwargs"]
    assert loading["attn_implementation"] == config.attention
    assert ("adapter" in python) == (config.method != "full")
    if config.method != "full":
        adapter = python["adapter"]
        assert (values["lora_r"], values["lora_alpha"], values["lora_dropout"]) == (4, 8, 0.0)
        assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (4, 8, 0.0)
        for switch in ("use_dora", "use_rslora"):
            assert values[switch] is adapter[switch] is (config.lora_variant == switch[4:])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qlora", (True, False, "nf4", True, "torch.bfloat16")),
        ("fp4", (True, False, "fp4", False, "torch.bfloat16")),
        ("int8", (False, True, "fp4", False, "torch.float32")),
    ],
)
def test_bitsandbytes_loads_it(
    report: dict[str, Any], name: str, expected: tuple[Any, ...]
) -> None:
    values = of(report, name, "quantization_config.json")
    keys = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    assert tuple(values[key] for key in (*keys, "compute")) == expected


CLASSES = {
    "lora": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "rslora": ("LoraConfig", {"use_rslora": True, "use_dora": False}),
    "dora": ("LoraConfig", {"use_dora": True, "use_rslora": False}),
    "adapter vera": ("VeraConfig", {"r": 4}),
    "adapter miss": ("MissConfig", {"r": 4}),
    "adapter oft": ("OFTConfig", {"target_modules": "all-linear"}),
    "adapter ia3": ("IA3Config", {}),
    "adapter prompt_tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "adapter p_tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4}),
    "adapter prefix_tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "adapter adaption_prompt": ("AdaptionPromptConfig", {"adapter_len": 4}),
    "adapter trainable_tokens": ("TrainableTokensConfig", {}),
    "adapter peft": ("LoraConfig", {"bias": "lora_only", "layers_to_transform": [0, 2]}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_peft_loads_it(report: dict[str, Any], name: str) -> None:
    kind, expected = CLASSES[name]
    values = of(report, name, "adapter_config.json")
    assert values["class"] == kind
    assert values["task_type"] == "CAUSAL_LM"
    assert {key: values[key] for key in expected} == expected


def test_every_loader_was_asked(report: dict[str, Any]) -> None:
    asked = {file for values in report.values() for file in values}
    written = {each.filename for each in export.FURTHER if each.filename[-2:] != "md"}
    # Two have tests of their own in test_axolotl.py and test_llama_factory.py.
    others = {"torchtune.yaml", "train_unsloth.py", "axolotl.yaml", "llama_factory.yaml"}
    assert written - asked == others | {f"{command}_config.yaml" for command in OF_COMPLETIONS}


@pytest.mark.parametrize("command", OF_COMPLETIONS)
def test_trl_takes_the_settings_of_what_writes_completions(command: str, tmp_path: Path) -> None:
    """Training wants a reward besides: test_find_preferences.py."""
    trl = pytest.importorskip("trl")
    row = TRL_BY_TASK[command]
    groups = {
        "num_generations": 4, "kl_beta": 0.04, "num_iterations": 1, "steps_per_generation": 2,
        "vllm_gpu_memory_utilization": 0.25, "vllm_enable_sleep_mode": True,
    }  # fmt: skip
    config = dataclasses.replace(
        PADDED,
        trainer=row.name,
        activation_checkpointing=0,
        precision="fp32",
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        **(FIXED_BY_A_TEACHER if row.has_teacher else groups),
    )
    teacher = Teacher(name="larger", config_json="{}") if row.has_teacher else None
    export.export_files(
        tmp_path,
        workload=Workload(
            model="llama",
            task=command,
            memory_budget_bytes=10**9,
            teacher=teacher,
            extra_arguments='{"eval_strategy": "steps"}',
        ),
        config=config,
        result={"evidence": "predicted"},
    )
    (path,) = tmp_path.rglob(f"{command}_config.yaml")
    kinds = trl.ScriptArguments, getattr(trl, row.arguments_class), trl.ModelConfig
    # Unknown keys are an error here.
    _, read, _ = trl.TrlParser(kinds).parse_args_and_config(
        ["--config", str(path), "--use_cpu", "true"]
    )
    assert (read.per_device_train_batch_size, read.gradient_accumulation_steps) == (2, 2)
    assert read.max_completion_length == 8
    assert read.model_init_kwargs == {"device_map": None}
    # A batch of an evaluation has room for two completions of a prompt.
    assert row.has_teacher or read.num_generations_eval == 2
    if row.has_teacher:
        assert read.teacher_model_name_or_path == "larger"
        loading = {"dtype": "float32", "device_map": None}
        assert (read.beta, read.teacher_model_init_kwargs) == (1.0, loading)
        return
    assert (read.num_generations, read.beta) == (4, 0.04)
    assert (read.steps_per_generation, read.num_iterations) == (2, 1)
    assert (read.use_vllm, read.vllm_mode, read.vllm_enable_sleep_mode) == (True, "colocate", True)
    assert read.vllm_gpu_memory_utilization == 0.25
    assert read.vllm_max_model_length == config.sequence_length
    again = read_base(path, task=command).config
    assert dataclasses.replace(again, sequence_length=config.sequence_length) == config


def near_a_guess(loss: float) -> None:
    """Untrained models guess among 64 tokens."""
    assert loss == pytest.approx(math.log(64), rel=0.3)


def test_trainer_takes_two_steps(report: dict[str, Any]) -> None:
    values = of(report, "half", "trainer")
    assert values["steps"] == 2
    near_a_guess(values["loss"])


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("way", ["trl yaml", "trl python"])
def test_sft_trainer_takes_the_steps(report: dict[str, Any], way: str, name: str) -> None:
    config: TrainConfig = CONFIGS[name]
    values = of(report, name, way)
    # Three epochs of four micro-batches.
    assert values["steps"] == (2 if way == "trl yaml" else 12 // config.gradient_accumulation_steps)
    near_a_guess(values["loss"])
    assert (len(values["batch"]), values["length"]) == (2, 16)
    # A program puts a plan into the model; a file has every layer checkpointed.
    is_planned = config.has_plan and way == "trl python"
    assert values["planned"] == (config.checkpoint_layers if is_planned else 0)
    assert values["checkpointing"] is (config.activation_checkpointing > 0 and not is_planned)
    dtype = {"fp32": "float32"}.get(config.precision, "bfloat16")
    assert values["dtype"] == f"torch.{dtype}"
    other = "trl python" if way == "trl yaml" else "trl yaml"
    assert values["trainable"] == of(report, name, other)["trainable"]


LOSS_AT_FIRST = {
    "dpo": pytest.approx(math.log(2), rel=0.01),
    "reward": pytest.approx(math.log(2), rel=0.05),
    "kto": pytest.approx(0.5, rel=0.01),
}
"""Those of a coin: the policy is the reference still, as good as; a new head gives rewards near zero."""


@pytest.mark.parametrize("name", OF_TASKS)
@pytest.mark.parametrize("way", ["trl yaml", "trl python"])
def test_trainers_of_preferences_and_rewards_take_the_steps(
    report: dict[str, Any], way: str, name: str
) -> None:
    config = OF_TASKS[name]
    row = TRAINERS[config.trainer]
    values = of(report, name, way)
    assert values["steps"] == (2 if way == "trl yaml" else 6)  # three epochs of two steps
    assert values["loss"] == LOSS_AT_FIRST[row.task]
    # The prompt, the longer answer and its end; what is scored before needs no reference.
    assert (len(values["batch"]), values["length"]) == (2, 16)
    is_copied = config.method == "full" and not config.precompute_ref_log_probs
    assert values["reference"] is (row.has_reference and is_copied)
    assert values["checkpointing"] is (config.activation_checkpointing > 0)
    other = "trl python" if way == "trl yaml" else "trl yaml"
    assert values["trainable"] == of(report, name, other)["trainable"]
    arguments = of(report, name, f"{row.command}_config.yaml")
    assert arguments.get("precompute_ref_log_probs", False) is config.precompute_ref_log_probs
    assert arguments["max_length"] == config.sequence_length


def test_a_dataset_that_is_not_there_is_said_in_a_line(report: dict[str, Any]) -> None:
    for name in OF_TASKS:
        assert of(report, name, "no file")["said"].endswith("none.jsonl: there is no such file.")


@pytest.mark.parametrize("way", ["trl yaml", "trl python"])
def test_the_head_of_a_reward_model_trains_beside_its_adapter(
    report: dict[str, Any], way: str
) -> None:
    adapter = of(report, "dpo-lora", way)["trainable"]
    assert of(report, "reward-qlora", way)["trainable"] == adapter + 64


def test_model_and_adapter_from_the_two_files(report: dict[str, Any]) -> None:
    values = of(report, "dora", "peft")
    # Rank 4 on seven projections of four layers, and DoRA's magnitudes.
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    assert values["trainable"] == 4 * sum(4 * (i + o) + o for i, o in sizes)
    assert "Linear4bit" in " ".join(values["layers"])
