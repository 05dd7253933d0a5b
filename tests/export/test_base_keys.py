"""Every key of a trainer's classes, in a `--base`: it is a setting, goes to the other files, or is named."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loaders
import pytest
import yaml
from lacking import needs

from autotune.errors import ConfigError
from autotune.export import training_args
from autotune.export.base.read import BaseRun, read_base

SFT = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "use_peft": True,
    "lora_target_modules": ["q_proj", "v_proj"],
    "max_length": 512,
    "packing": True,
}
ARGUMENTS = {"output_dir": "out", "per_device_train_batch_size": 2, "bf16": True}
AXOLOTL = {
    "base_model": "Qwen/Qwen2.5-0.5B",
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "sequence_len": 512,
    "sample_packing": True,
}
LLAMA_FACTORY = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "stage": "sft",
    "finetuning_type": "lora",
    "bf16": True,
}
PROGRAM = """
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen2.5-0.5B", dtype="bfloat16", quantization_config=BitsAndBytesConfig({quantization}))
model = get_peft_model(model, LoraConfig({adapter}))
Trainer(model, TrainingArguments(output_dir="out", bf16=True)).train()
"""
ADAPTER = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def classes(package: str, *places: str) -> Iterator[tuple[str, str]]:
    """Yield (field, annotation) of the classes in these files of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    for place in places:
        for path in sorted(Path(spec.origin).parent.glob(place)):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    yield node.target.id, ast.unparse(node.annotation)


def of_init(package: str, place: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield (parameter, "") of a class whose fields are those of its `__init__`."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    tree = ast.parse((Path(spec.origin).parent / place).read_text(encoding="utf-8"))
    (found,) = (each for each in tree.body if getattr(each, "name", "") == name)
    (init,) = (each for each in ast.walk(found) if getattr(each, "name", "") == "__init__")
    assert isinstance(init, ast.FunctionDef)
    for each in init.args.args[1:]:
        yield each.arg, "" if each.annotation is None else ast.unparse(each.annotation)


def values(annotation: str) -> list[Any]:
    """Return values of the type that no class has for its default; both for a switch."""
    kinds = re.findall(r"\w+", annotation)
    if not kinds:
        return [True, 7, "a_name_of_mine"]
    if "bool" in kinds:
        return [True, False]
    if "float" in kinds:
        return [0.1875]
    if "int" in kinds:
        return [7]
    if "list" in kinds or "List" in kinds:
        return [["a_name_of_mine"]]
    if "dict" in kinds or "Dict" in kinds:
        return [{"a_key_of_mine": 3}]
    return ["a_name_of_mine"]


def unaccounted(before: BaseRun, path: Path, key: str, value: Any, section: str = "") -> str:
    """Return the key and its value where neither settings, arguments nor words have them."""
    try:
        after = read_base(path)
    except ConfigError as error:
        return "" if key in str(error) else key
    arguments = json.loads(after.extra_arguments)
    if arguments.get(key) == value or arguments != json.loads(before.extra_arguments):
        return ""
    words = " ".join((*after.notes, *after.uncarried))
    named = re.search(rf"\b{re.escape(f'{section} {key}'.strip())}\b", words)
    return "" if after.config != before.config or after.model != before.model or named else key


def sweep(base: dict[str, Any], fields: Iterator[tuple[str, str]], path: Path) -> list[str]:
    """Return the keys that no value of theirs makes a difference for."""
    path.write_text(yaml.safe_dump(base))
    before = read_base(path)
    lost, known = [], dict(fields)
    assert len(known) > 20
    for key, annotation in known.items():
        others = [value for value in values(annotation) if base.get(key) != value]
        for value in others:
            path.write_text(json.dumps({**base, key: value}))
            if not unaccounted(before, path, key, value):
                break
        else:
            lost.append(key)
    return lost


FORMATS = {
    "SFTConfig": (
        SFT,
        "trl",
        ("trainer/sft_config.py", "trainer/base_config.py", "trainer/model_config.py"),
    ),
    "TRL's TrainingArguments": (SFT, "transformers", ("training_args.py",)),
    "TrainingArguments": (ARGUMENTS, "transformers", ("training_args.py",)),
    "axolotl": (AXOLOTL, "axolotl", ("utils/schemas/*.py",)),
    "LLaMA-Factory": (LLAMA_FACTORY, "llamafactory", ("hparams/*_args.py",)),
    "LLaMA-Factory's TrainingArguments": (LLAMA_FACTORY, "transformers", ("training_args.py",)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=loaders.needs(row[1])) for name, row in FORMATS.items()],
)
def test_no_key_of_a_file_vanishes(name: str, tmp_path: Path) -> None:
    base, package, places = FORMATS[name]
    lost = sweep(base, classes(package, *places), tmp_path / "base.yaml")
    # They say what axolotl does by default: sdpa, and bf16 on a card that has it.
    assert lost == (["bfloat16", "sdp_attention"] if package == "axolotl" else [])


@pytest.mark.parametrize(
    ("section", "fields", "given", "others"),
    [
        pytest.param(
            "adapter",
            list(classes("peft", "tuners/lora/config.py")),
            ADAPTER,
            BITS,
            marks=needs("peft"),
        ),
        pytest.param(
            "quantization",
            list(of_init("transformers", "utils/quantization_config.py", "BitsAndBytesConfig")),
            BITS,
            ADAPTER,
            marks=needs("transformers"),
        ),
    ],
)
def test_no_keyword_of_a_program_vanishes(
    section: str,
    fields: list[tuple[str, str]],
    given: dict[str, Any],
    others: dict[str, Any],
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.py"

    def write(**keywords: Any) -> None:
        named = {section: given | keywords}
        named.setdefault("adapter", others)
        named.setdefault("quantization", others)
        said = {
            name: ", ".join(f"{k}={v!r}" for k, v in each.items()) for name, each in named.items()
        }
        path.write_text(PROGRAM.format(**said))

    write()
    before, lost = read_base(path), []
    for key, annotation in dict(fields).items():
        for value in values(annotation):
            write(**{key: value})
            if not unaccounted(before, path, key, value, section):
                break
        else:
            lost.append(key)
    assert len(fields) >= 10
    assert lost == []


def test_a_saved_adapter_is_not_named_for_its_defaults(tmp_path: Path) -> None:
    """PEFT writes every field of the class, most of them at their default."""
    peft = pytest.importorskip("peft")
    peft.LoraConfig(**ADAPTER).save_pretrained(tmp_path)
    assert read_base(tmp_path / "adapter_config.json").uncarried == ()


def test_the_share_of_warm_up_steps_goes_on_as_each_trainer_says_it(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump({**SFT, "warmup_ratio": 0.03}))
    run = read_base(path)
    fields = training_args.installed_fields()
    name = "warmup_ratio" if "warmup_ratio" in fields else "warmup_steps"
    assert json.loads(run.extra_arguments) == {name: 0.03}
    assert run.notes == ()


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "openai-community/gpt2"])
def test_targets_that_nobody_names_are_pefts_for_the_model(model: str, tmp_path: Path) -> None:
    constants = pytest.importorskip("peft.utils.constants")
    table = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    names = table["gpt2" if "gpt2" in model else "qwen2"]
    yaml_file, program = tmp_path / "sft.yaml", tmp_path / "mine.py"
    content = {**SFT, "model_name_or_path": model}
    del content["lora_target_modules"]
    yaml_file.write_text(yaml.safe_dump(content))
    text = PROGRAM.format(quantization="load_in_4bit=True", adapter="r=8, lora_alpha=8")
    program.write_text(text.replace("Qwen/Qwen2.5-0.5B", model))
    for path in (yaml_file, program):
        run = read_base(path)
        assert run.config.lora_targets == ",".join(names)
        assert any("PEFT's own" in note for note in run.notes)
    # A model that nothing here knows: named as before.
    yaml_file.write_text(yaml.safe_dump({**content, "model_name_or_path": "nobody/nothing"}))
    with pytest.raises(ConfigError, match="lora_target_modules is missing"):
        read_base(yaml_file)


@pytest.mark.parametrize(
    ("said", "variable", "batch"),
    [
        ('int(os.environ.get("MY_BATCH", "4"))', None, 4),
        ('int(os.environ.get("MY_BATCH", 4))', "16", 16),
        ('int(os.getenv("MY_BATCH", "2"))', None, 2),
        ('int(os.environ["MY_BATCH"])', "8", 8),
    ],
)
def test_a_script_that_reads_the_environment_is_read_with_it(
    said: str,
    variable: str | None,
    batch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("MY_BATCH", variable)
    path = tmp_path / "mine.py"
    text = PROGRAM.format(
        quantization="load_in_4bit=True", adapter="r=8, target_modules=['q_proj']"
    )
    line = f"bf16=True, per_device_train_batch_size={said}"
    path.write_text(text.replace("bf16=True", line))
    assert read_base(path).config.micro_batch_size == batch
    path.write_text(f"BATCH = {said}\n{text.replace('bf16=True', line.replace(said, 'BATCH'))}")
    assert read_base(path).config.micro_batch_size == batch
    assert eval(said, {"os": os}) == batch  # the very expression


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = PROGRAM.format(
        quantization="load_in_4bit=True", adapter="r=8, target_modules=['q_proj']"
    )
    line = 'bf16=True, per_device_train_batch_size=int(os.environ["NOT_SET_HERE"])'
    path.write_text(text.replace("bf16=True", line))
    with pytest.raises(ConfigError, match="per_device_train_batch_size"):
        read_base(path)


def test_a_secret_of_the_environment_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-for-files")
    path = tmp_path / "mine.py"
    text = PROGRAM.format(
        quantization="load_in_4bit=True", adapter="r=8, target_modules=['q_proj']"
    )
    path.write_text(text.replace("bf16=True", 'bf16=True, hub_token=os.environ["HF_TOKEN"]'))
    run = read_base(path)
    assert json.loads(run.extra_arguments) == {"output_dir": "out"}
    assert not any("not-for-files" in note for note in run.notes)
