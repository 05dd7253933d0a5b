"""The files that we write do train: train.py for two steps on the CPU, with tiny models.

One child, forked from a process that has imported Trainer, runs all the programs, each as `__main__`.
About 20 s on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import here
import pytest

from autotune import export
from autotune.export import train_py
from autotune.export.extra_arguments import read_extra_arguments
from autotune.space.adapters import read_peft
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.dataset import Dataset

pytestmark = pytest.mark.slow

NUM_LAYERS = 4
NUM_STEPS = 2
WORDS = [f"w{number}" for number in range(60)]
TEXT = " ".join(WORDS * 8)

FULL = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    sequence_length=16,
    precision="fp32",
    optimizer="adamw_torch_fused",
)
LORA = dataclasses.replace(
    FULL,
    method="lora",
    precision="bf16-autocast",
    optimizer="adamw_torch",
    activation_checkpointing=2,
    lora_rank=4,
    lora_targets="all-linear",
)
QLORA = dataclasses.replace(
    LORA, method="qlora", quantization="nf4-double", activation_checkpointing=1
)
ATTENTION = dataclasses.replace(
    LORA,
    lora_targets="attention",
    attention="eager",
    activation_checkpointing=1,
    activation_offloading=True,
    precision="bf16-true",
)
PADDED = dataclasses.replace(FULL, batching="padded")
GROUPED = dataclasses.replace(FULL, batching="grouped")
# A CPU has no FlashAttention: train.py takes sdpa there, with a mask that keeps the samples apart.
IN_ONE_ROW = dataclasses.replace(
    FULL, batching="padding-free", attention="flash_attention_2", precision="bf16-mixed"
)
MIXED = dataclasses.replace(
    FULL,
    precision="bf16-mixed",
    optimizer="adafactor",
    attention="sdpa_expanded",
    chunked_loss=True,
    activation_checkpointing=1,
    checkpoint_plan="recompute-products",
    checkpoint_layers=1,
)
UPDATING = dataclasses.replace(FULL, update_in_backward=True, gradient_accumulation_steps=1)
FP8 = dataclasses.replace(FULL, precision="fp8-mixed", gradient_accumulation_steps=1)

SFT = dataclasses.replace(FULL, trainer="trl-sft", activation_checkpointing=1)
LORA_PLANNED = dataclasses.replace(
    LORA,
    activation_checkpointing=1,
    activation_offloading=False,
    checkpoint_plan="recompute-products",
    checkpoint_layers=2,
)
PLANNED = dataclasses.replace(SFT, checkpoint_plan="recompute", checkpoint_layers=3)
TOO_MANY = dataclasses.replace(PLANNED, trainer="transformers", checkpoint_layers=NUM_LAYERS + 1)
ADAPTED = dataclasses.replace(LORA, lora_rank=None, lora_targets=None, activation_checkpointing=0)
LINEAR = dataclasses.replace(ADAPTED, lora_rank=4, lora_targets="all-linear")
TOKENS = dataclasses.replace(ADAPTED, num_virtual_tokens=4)
ADAPTERS: dict[str, TrainConfig] = {
    **{
        name: dataclasses.replace(base, method=name)
        for base, names in (
            (LINEAR, ("vera", "miss")),
            (dataclasses.replace(LINEAR, lora_rank=None), ("oft",)),
            (ADAPTED, ("ia3",)),
            (
                TOKENS,
                (
                    "prompt_tuning",
                    "p_tuning",
                    "prefix_tuning",
                    "adaption_prompt",
                    "trainable_tokens",
                ),
            ),
        )
        for name in names
    },
    "rslora": dataclasses.replace(LORA, lora_variant="rslora", lora_dropout=0.1),
    "dora": dataclasses.replace(QLORA, lora_variant="dora"),
    "fp4": dataclasses.replace(QLORA, quantization="fp4"),
    "int8": dataclasses.replace(QLORA, quantization="int8"),
    "prompt on int8": dataclasses.replace(TOKENS, method="prompt_tuning", quantization="int8"),
    "peft": dataclasses.replace(
        ADAPTED,
        method="peft",
        peft=read_peft(
            {
                "peft_type": "LORA",
                "r": 4,
                "lora_alpha": 8,
                "lora_dropout": 0.1,
                "bias": "lora_only",
                "target_modules": ["self_attn.q_proj", "v_proj"],
                "layers_to_transform": [0, 2],
            }
        ),
    ),
}

# name: model folder, task, configuration, further options
RUNS: dict[str, tuple[str, str, TrainConfig, list[str]]] = {
    "full": ("llama", "causal-lm", FULL, []),
    "full-mixed": ("llama", "causal-lm", MIXED, []),
    "fp8": ("llama", "causal-lm", FP8, []),
    "in-backward": ("llama", "causal-lm", UPDATING, []),
    "full-from-config": ("llama", "causal-lm", FULL, ["--from-config"]),
    "lora": ("llama", "causal-lm", LORA, []),
    "sft": ("llama", "causal-lm", SFT, []),
    "lora-attention": ("llama", "causal-lm", ATTENTION, []),
    "qlora": ("llama", "causal-lm", QLORA, []),
    "padded": ("llama", "causal-lm", PADDED, []),
    "grouped": ("llama", "causal-lm", GROUPED, []),
    "padding-free": ("llama", "causal-lm", IN_ONE_ROW, []),
    "sft-padding-free": (
        "llama",
        "causal-lm",
        dataclasses.replace(IN_ONE_ROW, trainer="trl-sft"),
        [],
    ),
    "sft-padded": ("llama", "causal-lm", dataclasses.replace(PADDED, trainer="trl-sft"), []),
    "masked-padded": ("bert", "masked-lm", PADDED, []),
    "masked": (
        "bert",
        "masked-lm",
        dataclasses.replace(PLANNED, trainer="transformers", checkpoint_plan="offload"),
        [],
    ),
    "classes": ("bert", "sequence-classification", LORA, []),
    "seq2seq": ("t5", "seq2seq-lm", LORA_PLANNED, []),
    **{name: ("llama", "causal-lm", config, []) for name, config in ADAPTERS.items()},
}

EXTRA = {
    "learning_rate": 0.02,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 4,
    "max_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'w0' if m['role'] == 'user' else 'w1' }} {{ m['content'] }} [EOS] "
    "{% endfor %}{% if add_generation_prompt %}w1 {% endif %}"
)
CHAT = [
    [
        {"role": "user", "content": f"w{number} w3"},
        {"role": "assistant", "content": f"w{number} w5"},
        {"role": "user", "content": "w6"},
        {"role": "assistant", "content": "w7 w8 w9"},
    ]
    for number in range(10, 34)
]
# name: how the samples are batched, by which trainer
CHAT_RUNS = {
    "chat": FULL,
    "chat-padded": PADDED,
    "chat-padding-free": IN_ONE_ROW,
    "chat-sft-by-tokens": dataclasses.replace(PADDED, trainer="trl-sft", batching="by-tokens"),
    "chat-sft": PLANNED,
}

# name: the dataset's file, its content, what is said about it
BAD_DATA = {
    "short": ("short.txt", "w1 w2", "fewer than one block of 16"),
    "empty": ("empty.txt", "\n\n", "empty.txt: It is empty"),
    "no-field": ("no-field.jsonl", '{"body": "w1"}', "Sample 1 has the fields body"),
    "no-json": ("no-json.jsonl", "[1", "Line 1 is not JSON"),
    "roles": ("roles.jsonl", '{"messages": [{"role": "boss", "content": "w1"}]}', "the role boss"),
    "no-answer": (
        "no-answer.jsonl",
        json.dumps({"messages": [{"role": "user", "content": TEXT}]}),
        "has no answer: there is nothing to learn",
    ),
    "late": ("late.jsonl", json.dumps({"prompt": TEXT, "completion": "w1"}), "within the first 16"),
}


def make_models(folder: Path, num_layers: int = NUM_LAYERS) -> None:
    """Folders with a tiny model and its tokenizer: llama, bert, t5."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        T5Config,
        T5ForConditionalGeneration,
    )

    words = ["[PAD]", "[UNK]", "[EOS]", "[MASK]", *WORDS]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    special |= {"eos_token": "[EOS]", "mask_token": "[MASK]"}
    llama = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=0,
    )
    bert = BertConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    t5 = T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_layers=num_layers,
        num_heads=2,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = {
            "llama": LlamaForCausalLM(llama),
            "bert": BertForMaskedLM(bert),
            "t5": T5ForConditionalGeneration(t5),
        }
    for name, model in made.items():
        tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model.save_pretrained(folder / name)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(folder / name)


DRIVER = """
import contextlib, io, json, os, runpy, sys, traceback
import torch.utils.checkpoint
import transformers.modeling_utils
real = transformers.modeling_utils.checkpoint
num_checkpoints = 0
def counting(*args, **kwargs):
    global num_checkpoints
    num_checkpoints += 1
    assert kwargs["use_reentrant"] is False
    return real(*args, **kwargs)
transformers.modeling_utils.checkpoint = counting
# A plan of checkpointing calls torch's own with a layer's method, a loss in parts with a function.
of_torch = torch.utils.checkpoint.checkpoint
def counting_layers(function, *args, **kwargs):
    is_layer = hasattr(function, "__self__")
    return (counting if is_layer else of_torch)(function, *args, **kwargs)
torch.utils.checkpoint.checkpoint = counting_layers

from transformers import Trainer
training_step = Trainer.training_step
batches = []
def watched(self, model, inputs, *more):
    names = ("input_ids", "labels")
    batches.append([inputs[name].flatten().tolist() for name in names if name in inputs])
    return training_step(self, model, inputs, *more)
Trainer.training_step = watched

programs, report_path = json.loads(sys.argv[1]), sys.argv[2]
reports = {}
for name, (arguments, program) in programs.items():
    sys.argv = [program, *arguments]
    num_checkpoints = 0
    batches = []
    before = dict(os.environ)
    printed = io.StringIO()
    problem = ""
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(program, run_name="__main__")
    except BaseException:
        problem = traceback.format_exc()
    os.environ.clear()
    os.environ.update(before)
    reports[name] = dict(
        printed=printed.getvalue(), problem=problem, num_checkpoints=num_checkpoints, batches=batches
    )
with open(report_path, "w") as file:
    json.dump(reports, file)
"""


def run_python(code: str, *arguments: str) -> None:
    done = here.workers.program(code, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]


def pack_in_fp8(folder: Path, packed: Path, side: int = 32) -> None:
    """Write the model of a folder as Transformers' fine-grained fp8 stores it: codes, and a scale a block."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, packed)
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if "_proj" in name:
            rows, columns = weight.shape
            blocks = weight.float().view(rows // side, side, columns // side, side)
            scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            codes = (blocks / scales[:, None, :, None]).view(rows, columns)
            tensors[name] = codes.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [side, side]}
    (packed / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a tiny model and its tokenizer: llama, bert, t5."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A folder with a folder per row of RUNS: its files, `output`; and reports.json."""
    folder = tmp_path_factory.mktemp("runs")
    datasets = {
        "causal-lm": folder / "text.txt",
        "masked-lm": folder / "lines.jsonl",
        "sequence-classification": folder / "lines.jsonl",
        "seq2seq-lm": folder / "lines.jsonl",
    }
    datasets["causal-lm"].write_text(f"{TEXT}\n\n{TEXT}\n")
    rows = [
        {"text": TEXT, "label": ("yes", "no")[number % 2], "target": TEXT[:40]}
        for number in range(8)
    ]
    datasets["masked-lm"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    programs = {}
    for name, (model, task, config, options) in RUNS.items():
        export.export_files(
            folder / name,
            workload=Workload(model=str(models / model), task=task, memory_budget_bytes=10**9),
            config=config,
            result={"evidence": "predicted"},
        )
        arguments = [
            *("--dataset", str(datasets[task]), "--output-dir", str(folder / name / "output")),
            *("--max-steps", str(NUM_STEPS), "--learning-rate", "0.01", *options),
        ]
        programs[name] = (arguments, str(folder / name / "train.py"))
    export.export_files(
        folder / "extra",
        workload=dataclasses.replace(
            Workload(model=str(models / "llama"), memory_budget_bytes=10**9),
            extra_arguments=read_extra_arguments(EXTRA),
        ),
        config=FULL,
        result={"evidence": "predicted"},
    )
    text = str(datasets["causal-lm"])
    arguments = ["--dataset", text, "--set", "gradient_accumulation_steps=2"]
    programs["accumulated"] = (arguments, str(folder / "in-backward" / "train.py"))
    for name, options in (("extra", ["--eval-dataset", text]), ("extra, no evaluation", [])):
        arguments = ["--dataset", text, "--output-dir", str(folder / "extra" / "output"), *options]
        programs[name] = (arguments, str(folder / "extra" / "train.py"))
    for name, (filename, content, _) in BAD_DATA.items():
        path = folder / filename
        path.write_text(content, encoding="utf-8", errors="surrogateescape")
        program = "padded" if name == "late" else "full"
        programs[name] = (["--dataset", str(path)], str(folder / program / "train.py"))
    program = str(folder / "full" / "exports" / "train_sft.py")
    programs["no-field-for-trl"] = ([str(folder / "no-field.jsonl")], program)
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHAT))
    for name, config in CHAT_RUNS.items():
        export.export_files(
            folder / name,
            workload=Workload(model=str(models / "llama"), memory_budget_bytes=10**9),
            config=config,
            result={"evidence": "predicted"},
        )
        arguments = ["--dataset", str(chats), "--output-dir", str(folder / name / "output")]
        options = ["--max-steps", str(NUM_STEPS), "--eval-dataset", str(chats)]
        programs[name] = ([*arguments, *options], str(folder / name / "train.py"))
    answers = Dataset(
        name=str(chats), format="chat", loss_on="answers", text_field="messages", tokenizer="llama"
    )
    export.export_files(
        folder / "answers",
        workload=Workload(model=str(models / "llama"), dataset=answers, memory_budget_bytes=10**9),
        config=dataclasses.replace(FULL, trainer="trl-sft"),
        result={"evidence": "predicted"},
    )
    programs["answers"] = ([str(chats)], str(folder / "answers" / "exports" / "train_sft.py"))
    export.export_files(
        folder / "too-many",
        workload=Workload(model=str(models / "llama"), memory_budget_bytes=10**9),
        config=TOO_MANY,
        result={"evidence": "predicted"},
    )
    programs["too-many"] = (["--dataset", text], str(folder / "too-many" / "train.py"))
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        arguments = ["--dataset", text, "--output-dir", str(folder / "too-many" / "output")]
        options = ["--max-steps", "1", "--set", f"{name}=true"]
        programs[f"{name} set"] = ([*arguments, *options], str(folder / "too-many" / "train.py"))
    run_python(DRIVER, json.dumps(programs), str(folder / "reports.json"))
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_steps(runs: Path, name: str) -> None:
    report = json.loads((runs / "reports.json").read_text())[name]
    assert report["problem"] == ""
    found = re.search(rf"^{NUM_STEPS} steps, loss ([\d.]+)$", report["printed"], re.MULTILINE)
    assert found is not None
    # Untrained models guess: the mean over all micro-batches is near that of a uniform guess.
    num_choices = 2 if name == "classes" else 64
    assert float(found[1]) == pytest.approx(math.log(num_choices), rel=0.3)


OF_LLAMA = [name for name, row in RUNS.items() if row[0] == "llama"]


@pytest.mark.parametrize("name", [*OF_LLAMA, "masked"])
def test_the_checkpointing_that_was_chosen(runs: Path, name: str) -> None:
    config = RUNS[name][2]
    stride = config.activation_checkpointing
    num_layers = len(range(0, NUM_LAYERS, stride)) if stride else 0
    if config.checkpoint_plan in ("recompute", "offload"):
        num_layers = config.checkpoint_layers
    num_forwards = NUM_STEPS * config.gradient_accumulation_steps
    report = json.loads((runs / "reports.json").read_text())[name]
    assert report["num_checkpoints"] == num_layers * num_forwards


def test_a_plan_for_another_model_is_refused(runs: Path) -> None:
    report = json.loads((runs / "reports.json").read_text())["too-many"]
    assert report["problem"].splitlines()[-1] == (
        "SystemExit: LlamaForCausalLM has 4 layers that can be checkpointed, of 4, and the plan is for 5 of "
        "them. Set 'checkpoint_plan' to 'interval' in this file, or train the model it is for."
    )


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_what_is_set_of_checkpointing_goes_over_a_plan(runs: Path, name: str) -> None:
    report = json.loads((runs / "reports.json").read_text())[f"{name} set"]
    assert (report["problem"], report["num_checkpoints"]) == (
        "",
        NUM_LAYERS * TOO_MANY.gradient_accumulation_steps,
    )
    assert f"--set {name}=true is not what was chosen" in report["printed"]


def test_answers_in_a_template_that_trl_does_not_know_are_refused(runs: Path) -> None:
    report = json.loads((runs / "reports.json").read_text())["answers"]
    (line,) = report["problem"].splitlines()[-1:]
    assert line.startswith("SystemExit: The chat template is not training-compatible"), line
    assert line.endswith(
        "If that is the chat template: train.py takes any; or say assistant_only_loss=False here."
    )


def test_an_update_in_the_backward_pass_of_another_run_is_refused(runs: Path) -> None:
    report = json.loads((runs / "reports.json").read_text())["accumulated"]
    assert report["problem"].splitlines()[-1] == (
        "SystemExit: Weights cannot be updated in the backward pass: gradient_accumulation_steps is above 1. "
        "Leave that as it was, or set 'update_in_backward' to False in this file."
    )


@pytest.mark.parametrize("name", CHAT_RUNS)
def test_of_a_chat_the_answers_are_learnt(runs: Path, name: str) -> None:
    report = json.loads((runs / "reports.json").read_text())[name]
    assert report["problem"] == ""
    assert "chats.jsonl: chat, 24 samples" in report["printed"]
    # The words in front of them, by their places in the vocabulary: [EOS] is 2, w0 is 4.
    asked, learnt = {4 + 0, 4 + 1, 4 + 3, 4 + 6}, {4 + 5, 4 + 7, 4 + 8, 4 + 9}
    num_batches = NUM_STEPS * CHAT_RUNS[name].gradient_accumulation_steps
    if name not in (
        "chat",
        "chat-sft",
    ):  # after the first step the longest samples are tried, twice
        num_batches += 2
    assert len(report["batches"]) == num_batches
    for ids, labels in report["batches"]:
        pairs = list(zip(ids, labels, strict=True))
        assert all(label in (-100, token) for token, label in pairs)
        assert {label for token, label in pairs if token in asked} == {-100}
        assert -100 not in {label for token, label in pairs if token in learnt}
        # Half of the turns are answers, each with its end; packed blocks are cut anywhere.
        num_ends = sum(token == 2 and label == 2 for token, label in pairs)
        assert num_ends == 4 or (name in ("chat", "chat-sft") and 2 <= num_ends <= 6)


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def test_a_checkpoint_that_is_quantised_already_is_unpacked(
    runs: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    pack_in_fp8(models / "llama", tmp_path / "fp8")
    program = runpy.run_path(str(runs / "full" / "train.py"), run_name="imported")
    load = transformers.AutoModelForCausalLM.from_pretrained
    loading: dict[str, Any] = {}

    def watched(*arguments: Any, **settings: Any) -> Any:
        loading.update(settings)
        return load(*arguments, **settings)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", watched)
    options = argparse.Namespace(model=str(tmp_path / "fp8"), from_config=False, tokenizer=None)
    model = program["load_model"](options, None, None)
    # Without it, a card that can multiply in fp8 would get weights that Trainer cannot train.
    assert loading["quantization_config"].dequantize is True
    original = load(models / "llama").state_dict()
    for name, weight in model.state_dict().items():
        assert weight.dtype in (torch.bfloat16, torch.float32)
        torch.testing.assert_close(weight.float(), original[name], rtol=0.1, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViTImageProcessorPil", {"size": {"height": 64, "width": 64}}),
        ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 64}}),
        ("BitImageProcessorPil", {"size": {"shortest_edge": 64}}),
        ("PoolFormerImageProcessorPil", {}),
    ],
)
def test_a_picture_has_the_size_of_the_recipe(runs: Path, kind: str, settings: Any) -> None:
    import transformers
    from PIL import Image

    program = runpy.run_path(str(runs / "full" / "train.py"), run_name="imported")
    processor = getattr(transformers, kind)(**settings)
    made = processor(
        Image.new("RGB", (70, 90)), return_tensors="pt", **program["sizes_of"](processor, 32, 32)
    )
    assert made["pixel_values"].shape == (1, 3, 32, 32)


@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_another_dataset_than_the_recipes_is_recognised_anew(tmp_path: Path, loss_on: str) -> None:
    known = Dataset(
        name="chats.jsonl",
        format="chat",
        loss_on=loss_on,
        text_field="messages",
        tokenizer="m",
    )
    program = tmp_path / "train.py"
    workload = Workload(model="m", dataset=known, memory_budget_bytes=1)
    program.write_text(
        train_py.write(workload=workload, config=FULL, result={"evidence": "predicted"})
    )
    names = runpy.run_path(str(program), run_name="imported")
    assert names["RECIPE"]["data"].get("loss_on") == (None if loss_on == "answers" else "all")
    rows = {
        "chats": {"messages": CHAT[0]},
        "others": {"instruction": "w1", "output": "w2", "system": "w3", "history": [["w4", "w5"]]},
    }
    found = {}
    for name, row in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row))
        options = argparse.Namespace(format=None, text_field=None, answer_field=None)
        found[name] = names["read_data"](str(path), options)
    assert {name: data.format for name, data in found.items()} == {
        "chats": "chat",
        "others": "instruction",
    }
    with_template = argparse.Namespace(chat_template="{{ messages }}")
    turns = names["as_turns"](found["others"].samples[0], with_template).messages
    assert [each["role"] for each in turns] == ["system", *2 * ["user", "assistant"]]


def test_what_a_full_fine_tune_saves(runs: Path, models: Path) -> None:
    before, after = tensors(models / "llama"), tensors(runs / "full" / "output")
    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before)


def test_random_weights_are_other_weights(runs: Path) -> None:
    loaded, random = (
        tensors(runs / "full" / "output"),
        tensors(runs / "full-from-config" / "output"),
    )
    name = "model.embed_tokens.weight"
    assert (loaded[name] - random[name]).abs().max() > 0.02


@pytest.mark.parametrize(
    ("name", "num_projections"), [("lora", 7), ("lora-attention", 4), ("qlora", 7)]
)
def test_what_an_adapter_saves(runs: Path, name: str, num_projections: int) -> None:
    output = runs / name / "output"
    saved = tensors(output)
    assert len(saved) == 2 * num_projections * NUM_LAYERS
    assert {4} == {min(tensor.shape) for tensor in saved.values()}
    # PEFT starts with B = 0: anything else is training.
    assert all(saved[key].any() for key in saved if "lora_B" in key)
    adapter = json.loads((output / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["task_type"]) == (4, 8, "CAUSAL_LM")


@pytest.mark.parametrize(
    ("name", "peft_type", "shapes"),
    [
        ("vera", "VERA", {(4,), (4, 128), (128, 4), (64,), (32,), (128,)}),
        ("miss", "MISS", {(4, 64), (4, 32), (4, 128)}),
        ("prompt_tuning", "PROMPT_TUNING", {(4, 64)}),
        ("p_tuning", "P_TUNING", {(4, 64)}),
        ("prefix_tuning", "PREFIX_TUNING", {(4, 2 * NUM_LAYERS * 32)}),
        ("adaption_prompt", "ADAPTION_PROMPT", {(1, 4, 64), (1,)}),
        ("trainable_tokens", "TRAINABLE_TOKENS", {(4, 64)}),
        ("dora", "LORA", {(4, 64), (4, 128), (64, 4), (32, 4), (128, 4), (64,), (32,), (128,)}),
        ("peft", "LORA", {(4, 64), (64, 4), (32, 4)}),
    ],
)
def test_what_other_adapters_save(
    runs: Path, name: str, peft_type: str, shapes: set[tuple[int, ...]]
) -> None:
    output = runs / name / "output"
    assert {tuple(tensor.shape) for tensor in tensors(output).values()} == shapes
    assert json.loads((output / "adapter_config.json").read_text())["peft_type"] == peft_type


def test_every_method_is_here() -> None:
    assert {config.method for _, _, config, _ in RUNS.values()} == set(METHODS)


def test_a_classification_head_is_trained(runs: Path) -> None:
    saved = tensors(runs / "classes" / "output")
    heads = [tensor for key, tensor in saved.items() if key.endswith("classifier.weight")]
    assert [tuple(head.shape) for head in heads] == [(2, 64)]


def test_training_arguments_load(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    configs = [
        FULL,
        QLORA,
        ATTENTION,
        MIXED,
        dataclasses.replace(QLORA, precision="fp16-mixed", optimizer="paged_lion_8bit"),
    ]
    paths = []
    for index, config in enumerate(configs):
        files = export.export_files(
            tmp_path / str(index),
            workload=Workload(model="m", memory_budget_bytes=1),
            config=config,
            result={"evidence": "predicted"},
        )
        paths += [path for path in files if path.name == "training_args.json"]
    assert len(paths) == len(configs)
    for path in paths:
        values = json.loads(path.read_text(encoding="utf-8"))
        loaded = TrainingArguments(**values, use_cpu=True)
        assert {name: getattr(loaded, name) for name in values} == values


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_explained(runs: Path, name: str) -> None:
    report = json.loads((runs / "reports.json").read_text())[name]
    assert BAD_DATA[name][2] in report["problem"].splitlines()[-1]
    assert "SystemExit" in report["problem"]


def test_fields_that_trl_does_not_read_are_named(runs: Path) -> None:
    report = json.loads((runs / "reports.json").read_text())["no-field-for-trl"]
    assert (
        report["problem"]
        .splitlines()[-1]
        .endswith(
            "has no field 'text', but body: it needs messages, prompt and completion, or a text."
        )
    )
    assert "SystemExit" in report["problem"]


def test_as_a_user_runs_it(runs: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(runs / "full" / "train.py"), "--dataset", "absent.txt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "absent.txt: There is no such file. Name a file, a folder or a dataset of the Hub"
    )
    assert "Traceback" not in done.stderr


def test_what_the_user_has_set_is_what_trains(runs: Path) -> None:
    reports = json.loads((runs / "reports.json").read_text())
    report = reports["extra"]
    assert not report["problem"], report["problem"]
    # A quarter of 0.02 more in each of 4 steps of warm-up, from 0 on.
    rates = re.findall(r"'learning_rate': '([^']*)'", report["printed"])
    assert list(map(float, rates)) == pytest.approx([0.0, 0.005, 0.01])
    # After the second step, and at the end.
    assert report["printed"].count("'eval_loss'") == 2
    assert "3 steps, loss" in report["printed"]
    bare = reports["extra, no evaluation"]
    assert not bare["problem"], bare["problem"]
    assert "no eval_strategy." in bare["printed"]
    assert "eval_loss" not in bare["printed"]
