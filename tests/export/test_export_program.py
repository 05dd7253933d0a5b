"""Programs that people train with: read without being run, and given back with their literals changed."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ConfigError
from autotune.export import mapping_write
from autotune.export.base import conditions, program, program_edit
from autotune.export.base.edit import KeyEdit
from autotune.export.base.read import BaseRun, changes, read_base
from autotune.export.mapping import NotLiteral
from autotune.space.config import TrainConfig
from autotune.space.trainers import TRAINERS

BASES = Path(__file__).parents[1] / "data" / "bases"
QLORA = TrainConfig(
    method="qlora",
    quantization="nf4",
    lora_rank=16,
    lora_targets="q_proj,v_proj",
    sequence_length=2048,
    micro_batch_size=2,
    gradient_accumulation_steps=8,
    optimizer="paged_adamw_8bit",
    precision="bf16-autocast",
    activation_checkpointing=1,
    batching="padded",
    trainer="trl-sft",
    kbit_preparation=True,
)
UNSLOTH = dataclasses.replace(
    QLORA,
    kbit_preparation=False,
    lora_alpha_ratio=1.0,
    quantization="nf4-double",
    lora_targets="q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
    gradient_accumulation_steps=4,
    optimizer="adamw_8bit",
    activation_offloading=True,
)
LOADED = "m = AutoModelForCausalLM.from_pretrained('m', quantization_config=None)"
TRAINED = "t = Trainer(m, args=TrainingArguments('o'))"
SIZES = "per_device_train_batch_size=2, gradient_accumulation_steps=4"


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def theirs(folder: Path, name: str) -> Path:
    return written(folder, (BASES / f"{name}.py.txt").read_text(encoding="utf-8"))


def changed(run: BaseRun, **settings: Any) -> tuple[str, list[KeyEdit]]:
    answer = dataclasses.replace(run.config, **settings)
    text, _, left = run.parts[0].edited(changes(run, run.config, answer))
    path = written(run.path.parent, text)
    if not left:
        assert read_base(path).config == answer
    return text, left


def diff(run: BaseRun, **settings: Any) -> list[str]:
    text, left = changed(run, **settings)
    assert left == []
    lines = difflib.unified_diff(
        run.parts[0].text.splitlines(), text.splitlines(), n=0, lineterm=""
    )
    return [f"{line[0]} {line[1:].strip()}" for line in list(lines)[2:] if line[0] in "+-"]


def test_a_script_is_read(tmp_path: Path) -> None:
    run = read_base(theirs(tmp_path, "qlora"))
    assert run.config == QLORA
    assert run.model == "Qwen/Qwen2.5-1.5B"
    rest = {"output_dir": "out", "logging_steps": 10, "learning_rate": 2e-4}
    assert json.loads(run.extra_arguments) == rest
    said = " ".join(run.notes)
    assert "command line are taken at their defaults: lr=0.0002" in said
    assert "prepare_model_for_kbit_training (line 26)" in said
    assert "model quantization_config" not in run.uncarried


def test_a_checkpoint_that_is_unpacked_is_not_quantised(tmp_path: Path) -> None:
    text = (
        "AutoModelForCausalLM.from_pretrained('m', quantization_config=Mxfp4Config())\nSFTConfig()"
    )
    assert read_base(written(tmp_path, text)).config.method == "full"


@pytest.mark.parametrize(
    ("loaded", "task", "precision"),
    [
        ('BertForTokenClassification.from_pretrained("google-bert/bert-base-uncased")',
         "token-classification", "bf16-mixed"),
        ('AutoModelForQuestionAnswering.from_pretrained("google-bert/bert-base-uncased", dtype="auto")',
         "question-answering", "bf16-mixed"),
        ('AutoModelForSequenceClassification.from_pretrained("Qwen/Qwen2.5-0.5B")',
         "sequence-classification", "bf16-autocast"),
        ('AutoModelForMaskedLM.from_pretrained("google-bert/bert-base-uncased", torch_dtype=torch.bfloat16)',
         "masked-lm", "bf16-autocast"),
        ('T5ForConditionalGeneration.from_pretrained("google-t5/t5-base")', None, "bf16-mixed"),
    ],
)  # fmt: skip
def test_the_class_says_the_task_and_the_checkpoint_the_dtype(
    tmp_path: Path, loaded: str, task: str | None, precision: str
) -> None:
    run = read_base(written(tmp_path, f"m = {loaded}\na = TrainingArguments(bf16=True)\n"))
    assert (run.task, run.config.precision) == (task, precision)
    text, left = changed(run, precision="bf16-true")
    assert left == []
    assert re.search(r"dtype=(\"bfloat16\"|torch.bfloat16)", text)


def test_a_script_says_the_dtype_of_its_adapter(tmp_path: Path) -> None:
    path = theirs(tmp_path, "qlora")
    text = path.read_text(encoding="utf-8").replace(
        "    tokenizer = AutoTokenizer",
        "    model = get_peft_model(model, peft_config, autocast_adapter_dtype=False)\n"
        "    tokenizer = AutoTokenizer",
    )
    path.write_text(text, encoding="utf-8")
    assert read_base(path).config.adapter_in_base_dtype
    path.write_text(text.replace("=False)", "=True)"), encoding="utf-8")
    assert not read_base(path).config.adapter_in_base_dtype


def test_a_script_is_given_back(tmp_path: Path) -> None:
    run = read_base(theirs(tmp_path, "qlora"))
    assert diff(
        run,
        micro_batch_size=8,
        gradient_accumulation_steps=2,
        activation_checkpointing=2,
        precision="fp16-autocast",
        attention="flash_attention_2",
        liger=True,
    ) == [
        "- BATCH = 2  # of 24 GB",
        "+ BATCH = 8  # of 24 GB",
        "- bnb_4bit_compute_dtype=torch.bfloat16)",
        "+ bnb_4bit_compute_dtype=torch.float16)",
        '- MODEL, quantization_config=bnb, torch_dtype=torch.bfloat16, device_map={"": 0}',
        '+ MODEL, quantization_config=bnb, torch_dtype=torch.float16, device_map={"": 0}, '
        'attn_implementation="flash_attention_2"',
        "- gradient_accumulation_steps=8,",
        "+ gradient_accumulation_steps=2,",
        "- gradient_checkpointing_kwargs={'use_reentrant': False},",
        "+ gradient_checkpointing_kwargs={'use_reentrant': False, 'every_n_layers': 2},",
        "- bf16=True, logging_steps=10,",
        "+ bf16=False, fp16=True, logging_steps=10,",
        "- eval_batch_size=RANK)",
        "+ eval_batch_size=RANK,",
        "+ use_liger_kernel=True)",
    ]


def test_checkpointing_that_a_function_switches_on_is_not_switched_off(tmp_path: Path) -> None:
    run = read_base(theirs(tmp_path, "qlora"))
    assert run.target is not None
    assert not mapping_write.allows(run.target, "qlora", "activation_checkpointing", 0)
    assert mapping_write.allows(run.target, "qlora", "activation_checkpointing", 2)


ENABLE = "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"


@pytest.mark.parametrize(
    ("call", "said", "layers"),
    [
        ("prepare(model)", "", 1),
        ("prepare(model, gradient_checkpointing_kwargs={'use_reentrant': True})", "", 1),
        ("prepare(model)", "gradient_checkpointing=False,", 1),
        ("prepare(model, use_gradient_checkpointing=False)", "", 0),
        ("prepare(model, False)", "", 0),
        ("prepare(model, use_gradient_checkpointing=TA.gradient_checkpointing)", "", 0),
        ("prepare(model, other)", "", None),
        ("prepare(model) if torch.cuda.is_available() else model", "", 1),
        ("model if BATCH else prepare(model)", "", 0),
        ("prepare(model) if other else model", "", None),
        ("prepare(model) if other else model", "gradient_checkpointing=True,", 1),
        (f"model.{ENABLE}", "", 1),
        ("model.activation_checkpointing_enable(every_n_layers=2)", "", None),
    ],
)
def test_a_function_switches_checkpointing_on(
    tmp_path: Path, call: str, said: str, layers: int | None
) -> None:
    text = (BASES / "qlora.py.txt").read_text(encoding="utf-8")
    text = text.replace("_for_kbit_training\n", "_for_kbit_training as prepare\n")
    text = text.replace("prepare_model_for_kbit_training(model)", call)
    text = text.replace("gradient_checkpointing=True,", said)
    path = written(tmp_path, text)
    if layers is None:
        with pytest.raises(ConfigError, match=r"line 26: only running tells how .*switches"):
            read_base(path)
        return
    run = read_base(path)
    assert run.target is not None
    assert run.config.activation_checkpointing == layers
    assert run.config.kbit_preparation is ("prepare(" in call and not call.startswith("model if"))
    may_be_off = mapping_write.allows(run.target, "qlora", "activation_checkpointing", 0)
    assert may_be_off is (layers == 0)
    changed(run, activation_checkpointing=2)


EMBEDDING = """
model = SentenceTransformer("m", model_kwargs={"torch_dtype": torch.bfloat16})
model.max_seq_length = 256
loss = losses.Cached(model, mini_batch_size=16)
args = SentenceTransformerTrainingArguments("out", per_device_train_batch_size=64, bf16=True)
trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)
"""
CACHED = "CachedMultipleNegativesRankingLoss"


@pytest.mark.parametrize(
    ("old", "new", "task", "found"),
    [
        ("Cached", CACHED, None, ("sentence-similarity", 4)),
        ("Cached", CACHED, "sentence-triplets", ("sentence-triplets", 4)),
        ("Cached", "MultipleNegativesRankingLoss", None, ("sentence-similarity", 1)),
        ("losses.Cached(model, mini_batch_size=16)", "None", None, ("sentence-ratings", 1)),
        ("Cached", "CosineSimilarityLoss", None, "line 4: CosineSimilarityLoss is not predicted: CoSENT"),
        ("losses.Cached(model", f"MatryoshkaLoss(model, {CACHED}(model)", None, "MatryoshkaLoss is not"),
        ("Cached(model, mini_batch_size=16", f"{CACHED}(model, mini_batch_size=64", None, "a number below"),
        ("SentenceTransformerTrainer(", "CrossEncoderTrainer(", None, "line 6: CrossEncoderTrainer trains"),
    ],
)  # fmt: skip
def test_programs_that_embed_texts(
    tmp_path: Path, old: str, new: str, task: str | None, found: tuple[str, int] | str
) -> None:
    path = written(tmp_path, EMBEDDING.replace(old, new, 1))
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            read_base(path, task=task)
        return
    run = read_base(path, task=task)
    config = run.config
    assert (run.task, config.loss_mini_batches) == found
    assert TRAINERS[config.trainer].task == run.task
    assert (run.model, config.sequence_length, config.micro_batch_size) == ("m", 256, 64)
    assert (config.method, config.precision, config.batching) == ("full", "bf16-autocast", "padded")
    is_open = found[0] == "sentence-similarity"
    assert ("--task sentence-triplets has triplets" in " ".join(run.notes)) is is_open
    assert changes(run, config, config) == []
    answer = dataclasses.replace(config, precision="bf16-mixed", activation_checkpointing=1)
    text, _, left = run.parts[0].edited(changes(run, config, answer))
    assert left == []
    assert read_base(written(tmp_path, text), task=task).config == answer


@pytest.mark.parametrize(
    ("said", "precision"),
    [("bf16=True", "bf16-mixed"), ("fp16=True", "fp16-mixed"), ("", "fp32"), ("tf32=True", "tf32")],
)
def test_a_model_that_is_made_anew_is_in_float32(tmp_path: Path, said: str, precision: str) -> None:
    text = f"m = LlamaForCausalLM(LlamaConfig(hidden_size=64))\nTrainer(m, TrainingArguments('o', {said}))\n"
    run = read_base(written(tmp_path, text))
    assert (run.config.precision, run.model) == (precision, None)
    _, left = changed(run, micro_batch_size=2, precision="bf16-mixed")
    assert left == []


def test_a_checkpoint_in_float32_embeds_in_it(tmp_path: Path) -> None:
    text = EMBEDDING.replace("Cached", "CoSENTLoss")
    text = text.replace('"torch_dtype": torch.bfloat16', '"attn_implementation": "eager"')
    for model, precision in (
        ("google-bert/bert-base-uncased", "bf16-mixed"),
        (None, "bf16-autocast"),
    ):
        run = read_base(written(tmp_path, text), model=model)
        assert (run.config.precision, run.config.attention) == (precision, "eager")


BITS = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')"
ADAPTED = "m = get_peft_model(m, LoraConfig(r=8, lora_alpha=16, target_modules=['v_proj']))"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (f"q = {BITS} if OFF else None\n{LOADED}", {"method": "full"}),
        (f"if KIND == 'lora':\n  {ADAPTED}\n{LOADED}", {"method": "full"}),
        (f"if not OFF and KIND != 'lora':\n  {LOADED}\n{ADAPTED}", {"method": "lora"}),
        (f"if __name__ == '__main__':\n  {LOADED}\n  {ADAPTED}", {"method": "lora"}),
        (f"q = {BITS}\n{LOADED}", {"method": "full", "quantization": "none"}),
        (f"{LOADED}\nm.to('cuda').train()\nfor p in m.parameters():\n  p.requires_grad = False\n{ADAPTED}",
         {"method": "lora", "precision": "bf16-true"}),
        (f"{LOADED}\nAutoPeftModelForCausalLM", {"method": "full"}),
        (f"from x import AutoLigerKernelForCausalLM\n{LOADED.replace('AutoModel', 'AutoLigerKernel')}",
         {"liger": True}),
        (f"apply_liger_kernel_to_qwen2()\n{LOADED}", {"liger": True}),
        (LOADED.replace("quantization_config=None", "attn_implementation='kernels-community/flash-attn2'"),
         {"attention": "flash_attention_2"}),
    ],
)  # fmt: skip
def test_only_what_is_done_to_the_model_is_read(
    tmp_path: Path, text: str, settings: dict[str, Any]
) -> None:
    after = f"t.train()\n{LOADED}\nm.half()\nq = {BITS}\n"
    constants = "OFF = False\nKIND = 'qlora'\n"
    run = read_base(written(tmp_path, f"{constants}{text}\n{TRAINED}\n{after}"))
    assert {name: getattr(run.config, name) for name in settings} == settings
    is_unused = text.startswith(f"q = {BITS}\n")
    assert ("given to no model" in " ".join(run.notes)) is is_unused
    assert changed(run) == (run.parts[0].text, [])


@pytest.mark.parametrize("kind", ["mine.py", "mine.yaml"])
def test_an_adapter_over_a_checkpoint_that_is_quantised_is_qlora(tmp_path: Path, kind: str) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = {"model_type": "llama", "quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    program = f"{LOADED}\n{ADAPTED}\n{TRAINED}".replace("'m'", repr(str(tmp_path)))
    axolotl = f"base_model: {tmp_path}\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
    path = tmp_path / kind
    path.write_text(program if kind == "mine.py" else axolotl, encoding="utf-8")
    run = read_base(path)
    assert (run.config.method, run.config.quantization) == ("qlora", "nf4")
    assert "are stored in nf4, and an adapter trains over that" in " ".join(run.notes)
    assert mapping_write.allows(run.target, "qlora", "quantization", "nf4")
    assert changes(run, run.config, run.config) == []
    path.write_text(path.read_text().replace(str(tmp_path), "elsewhere"))
    assert read_base(path).config.method == "lora"


def test_a_reference_is_not_the_model_that_trains(tmp_path: Path) -> None:
    text = f"{LOADED}\nref = AutoModelForCausalLM.from_pretrained('other')\nref.requires_grad_(False)\n"
    trainer = "DPOTrainer(m, ref_model=ref, args=DPOConfig(output_dir='o'))\n"
    run = read_base(written(tmp_path, text + trainer))
    assert (run.model, run.config.trainer, run.config.method) == ("m", "trl-dpo", "full")


ACCELERATOR = 'accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)'
LOOP = f"""
model = AutoModelForCausalLM.from_pretrained("m", dtype=torch.bfloat16)
{ACCELERATOR}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)
loader = DataLoader(train, shuffle=True, batch_size=16)
other = DataLoader(test, batch_size=64)
"""


@pytest.mark.parametrize(
    ("old", "new", "settings"),
    [
        ("", "", {}),
        ('mixed_precision="bf16", ', "", {"precision": "bf16-true"}),
        ('mixed_precision="bf16"', 'mixed_precision="no"', {"precision": "bf16-true"}),
        ("dtype=torch.bfloat16", "dtype=torch.float32", {"precision": "bf16-mixed"}),
        (', fused=True', "", {"optimizer": "adamw_torch"}),
        ("torch.optim.AdamW(", "bnb.optim.PagedAdamW8bit(", {"optimizer": "paged_adamw_8bit"}),
        (ACCELERATOR, "with torch.autocast('cuda', dtype=torch.bfloat16): ...",
         {"gradient_accumulation_steps": 1}),
        (ACCELERATOR, "accumulate = 2", {"precision": "bf16-true", "gradient_accumulation_steps": 2}),
        ("optimizer =", "model.gradient_checkpointing_enable()\noptimizer =",
         {"activation_checkpointing": 1}),
    ],
)  # fmt: skip
def test_a_loop_of_its_own(tmp_path: Path, old: str, new: str, settings: dict[str, Any]) -> None:
    path = written(tmp_path, LOOP.replace(old, new, 1))
    run = read_base(path, samples=32)
    usual = {
        "precision": "bf16-autocast",
        "micro_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "optimizer": "adamw_torch_fused",
    }
    for name, value in {**usual, **settings}.items():
        assert getattr(run.config, name) == value
    assert "its loop is its own" in " ".join(run.notes)
    target = run.target
    assert target is not None
    for name in ("optimizer", "liger", "batching", "attention"):
        assert mapping_write.allows(target, "full", name, getattr(run.config, name))
    assert mapping_write.allows(target, "full", "optimizer", "adafactor")
    if not settings:
        answer = {"precision": "bf16-true", "micro_batch_size": 8, "gradient_accumulation_steps": 8}
        assert diff(run, **answer) == [
            f"- {ACCELERATOR}",
            '+ accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=8)',
            "- loader = DataLoader(train, shuffle=True, batch_size=16)",
            "+ loader = DataLoader(train, shuffle=True, batch_size=8)",
        ]


@pytest.mark.parametrize(
    ("trainer", "settings"),
    [
        ("SFTTrainer(model='m', train_dataset=d)",
         {"trainer": "trl-sft", "activation_checkpointing": 1, "precision": "bf16-mixed"}),
        ("Trainer(model=AutoModelForCausalLM.from_pretrained('m'))", {"precision": "bf16-true"}),
        ("class Mine(Trainer): ...\nMine(AutoModelForCausalLM.from_pretrained('m'), args=None)", {}),
    ],
)  # fmt: skip
def test_a_trainer_without_arguments_has_its_own(
    tmp_path: Path, trainer: str, settings: dict[str, Any]
) -> None:
    run = read_base(written(tmp_path, f"t = 1\n{trainer}\n"))
    assert run.config.micro_batch_size == 8
    assert not run.taken
    assert all(getattr(run.config, name) == value for name, value in settings.items())
    assert ("what it overrides is not predicted" in " ".join(run.notes)) is ("Mine" in trainer)
    _, left = changed(run, micro_batch_size=4)
    assert [each.key for each in left] == ["per_device_train_batch_size"]


def test_a_constant_with_two_uses_stays(tmp_path: Path) -> None:
    """RANK says something else too."""
    run = read_base(theirs(tmp_path, "qlora"))
    assert diff(run, lora_rank=64, lora_dropout=0.1) == [
        "- r=RANK,  # was 8",
        "- lora_alpha=32,",
        "+ r=64,  # was 8",
        "+ lora_alpha=128,",
        '- task_type="CAUSAL_LM"',
        '+ task_type="CAUSAL_LM",',
        "+ lora_dropout=0.1",
    ]


def test_unsloths_notebook(tmp_path: Path) -> None:
    path = theirs(tmp_path, "unsloth")
    run = read_base(path)
    assert run.config == UNSLOTH
    assert read_base(path, has_bf16=False).config.precision == "fp16-mixed"
    assert diff(
        run,
        method="lora",
        quantization="none",
        activation_checkpointing=0,
        activation_offloading=False,
        batching="packed",
    ) == [
        "- load_in_4bit = True",
        "+ load_in_4bit = False",
        "+ use_gradient_checkpointing=False,",
        '- use_gradient_checkpointing = "unsloth",',
        "+ use_gradient_checkpointing = False,",
        "- packing = False,",
        "+ packing = True,",
    ]


@pytest.mark.parametrize(
    ("old", "new", "settings"),
    [
        ("max_seq_length = max_seq_length,\n    packing", "max_seq_length = 512,\n    packing",
         {"sequence_length": 512}),
        ("max_seq_length = max_seq_length,\n    packing", "max_seq_length = 9000,\n    packing", {}),
        ("max_seq_length = max_seq_length,\n    packing", "max_length = 512,\n    packing", {}),
        ("fp16 = not is_bfloat16_supported(),", "", {}),
        ("bf16 = is_bfloat16_supported(),", "", {}),
        ("dtype = dtype,", "dtype = dtype, fast_inference = True,", "shares the card with vLLM"),
        ("random_state = 3407", "qat_scheme = 'int4'", "adds quantisation"),
        ("FastLanguageModel", "FastSentenceTransformer", "FastSentenceTransformer is not"),
    ],
)  # fmt: skip
def test_unsloths_own_defaults(
    tmp_path: Path, old: str, new: str, settings: dict[str, Any] | str
) -> None:
    text = (BASES / "unsloth.py.txt").read_text(encoding="utf-8")
    assert old in text
    path = written(tmp_path, text.replace(old, new))
    if isinstance(settings, str):
        with pytest.raises(ConfigError, match=settings):
            read_base(path)
    else:
        assert read_base(path).config == dataclasses.replace(UNSLOTH, **settings)


NEVER_RUN = """
if False:
    model, tokenizer = FastLanguageModel.from_pretrained("lora_model", load_in_4bit=False)
elif 0:
    model = AutoPeftModelForCausalLM.from_pretrained("lora_model")
else:
    print(model)
if True:
    print(model)
else:
    arguments = TrainingArguments(per_device_train_batch_size=64)
"""


def test_what_a_notebook_never_runs_is_passed_over(tmp_path: Path) -> None:
    """Those of Unsloth load what was trained under `if False`, for a reader to switch on."""
    text = (BASES / "unsloth.py.txt").read_text(encoding="utf-8") + NEVER_RUN
    run = read_base(written(tmp_path, text))
    assert run.config == UNSLOTH
    assert changed(run) == (text, [])


@pytest.mark.parametrize("trainer", ["DPOTrainer", "GRPOTrainer", "ORPOTrainer", "Seq2SeqTrainer"])
def test_another_trainer_of_unsloths_is_not_taken_for_sft(tmp_path: Path, trainer: str) -> None:
    text = (BASES / "unsloth.py.txt").read_text(encoding="utf-8")
    for alike in ("UnslothTrainer", "Trainer"):
        assert (
            read_base(written(tmp_path, text.replace("SFTTrainer(", f"{alike}("))).config == UNSLOTH
        )
    with pytest.raises(ConfigError, match=f"{trainer} trains with Unsloth.*SFTTrainer"):
        read_base(written(tmp_path, text.replace("SFTTrainer(", f"{trainer}(")))
    another = "auto_model = WhisperForConditionalGeneration,"
    path = written(tmp_path, text.replace("dtype = dtype,", another, 1))
    with pytest.raises(ConfigError, match="auto_model: loads another kind of model"):
        read_base(path)


def test_what_is_not_changed_stays_byte_for_byte(tmp_path: Path) -> None:
    text = (BASES / "qlora.py.txt").read_text(encoding="utf-8")
    for content in (text, text.replace("\n", "\r\n"), "\ufeff" + text):
        run = read_base(written(tmp_path, content))
        assert changed(run) == (content, [])
        new, left = changed(run, micro_batch_size=4, liger=True)
        assert left == []
        assert new.count("\r\n") in (0, new.count("\n"))
        assert new.replace("BATCH = 4", "BATCH = 2").startswith(content[:600])


@pytest.mark.parametrize(
    ("old", "change", "new"),
    [
        ("f()", KeyEdit(key="bf16", value=True), "f(bf16=True)"),
        ("f('out')", KeyEdit(key="bf16", value=True), "f('out', bf16=True)"),
        ("f(a=1, b=2)", KeyEdit(key="c", value="x", after=("a",)), 'f(a=1, c="x", b=2)'),
        ("f(a=1, b=2,)", KeyEdit(key="c", value=[1]), "f(a=1, b=2, c=[1],)"),
        ("f(a=1, b=2)", KeyEdit(key="a", value=None), "f(b=2)"),
        ("f(a=1, b=2)", KeyEdit(key="b", value=None), "f(a=1)"),
        ("f(\n    a=1,  # one\n    b=2,\n)", KeyEdit(key="c", value=3, after=("a",)),
         "f(\n    a=1,  # one\n    c=3,\n    b=2,\n)"),
        ("f(\n    a=1,\n    b=2  # two\n)", KeyEdit(key="c", value=3),
         "f(\n    a=1,\n    b=2,  # two\n    c=3\n)"),
        ("f(\n    a=1,  # one\n    b=2,\n)", KeyEdit(key="a", value=None), "f(\n    b=2,\n)"),
        ("f(a={'x': 1})", KeyEdit(key="a.y", value=2), "f(a={'x': 1, 'y': 2})"),
        ("f(a={'x': 1}, b=2)", KeyEdit(key="a.x", value=None), "f(b=2)"),
        ("f(a=dict(x=1))", KeyEdit(key="a.x", value=2), "f(a=dict(x=2))"),
        ("f(a=(1))", KeyEdit(key="a", value=2), "f(a=(2))"),
        ("f(a=None)", KeyEdit(key="a.x", value=2), 'f(a={"x": 2})'),
        ("f(**{'a': 1})", KeyEdit(key="a", value=2), "f(**{'a': 2})"),
        ("f(é='ü', a=1)", KeyEdit(key="a", value="\"'\n\u2028"), "f(é='ü', a='\"\\'\\n\\u2028')"),
        ("f(old=True)", KeyEdit(key="new", value="x", instead="old"), 'f(new="x")'),
        ("f()", KeyEdit(key="model_init_kwargs.dtype", value="bfloat16"),
         'f(model_init_kwargs={"dtype": "bfloat16"})'),
    ],
)  # fmt: skip
def test_one_change(old: str, change: KeyEdit, new: str) -> None:
    old, new = (text.replace("f(", "TrainingArguments(", 1) for text in (old, new))
    assert program_edit.edited(f"x = {old}  # end\n", [change]) == (f"x = {new}  # end\n", [])
    ast.parse(new)


def test_what_cannot_be_placed_is_named_and_nothing_else_is_touched() -> None:
    text = "x = TrainingArguments(**{'a': (1)})\n"
    change = KeyEdit(key="b", value=2)
    assert program_edit.edited(text, [change, KeyEdit(key="a", value=3)]) == (
        "x = TrainingArguments(**{'a': (3)}, b=2)\n",
        [],
    )
    stray = KeyEdit(key="quantization:load_in_4bit", value=True)
    assert program_edit.edited(text, [stray]) == (text, [stray])


def test_a_program_is_never_run(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        f"x = TrainingArguments({SIZES}, learning_rate=exec('1'))\n",
    )
    run = read_base(path)
    assert run.config.micro_batch_size == 2
    assert "learning_rate: exec('1') (line 3)" in " ".join(run.notes)
    assert not (tmp_path / "ran").exists()


LOADER = "AutoModelForCausalLM.from_pretrained"
OWN_FIELDS = {
    "a dict": ("C = {'b': 3, 'm': {'n': 'm'}}\n", "C['b']", "C['m']['n']"),
    "asked with a default": ("C = {'b': 3}\nC.items()\n", "C.get('b', 8)", "C.get('n', 'm')"),
    "a class": ("class C:\n  b = 3\n  n: str = 'm'\n", "C.b", "C.n"),
    "an instance": (
        "class C:\n  def __init__(self):\n    self.b = 3\n    self.n = 'm'\nc = C()\n", "c.b", "c.n",
    ),
    "a parameter of a dataclass": (
        "@dataclass\nclass C:\n  b: int = 8\n  n: str = field(default='m')\nmain(C(b=3))\n"
        "def main(c: C):\n  ", "c.b", "c.n",
    ),
    "parameters of a function that is called": ("f(n='m')\ndef f(n, b=3):\n  ", "int(b)", "str(n)"),
    "parameters of a command": ("fire.Fire(f)\ndef f(n='m', b: int = 3):\n  ", "int(b)", "str(n)"),
    "one after another": ("B = 3\nC = {'b': B, 'n': 'm'}\n", "int(C['b'])", "str(C['n'])"),
    "this and that": ("C = {'a': True}\n", "3 if other() and not C['a'] or C['a'] else 8", "'m'"),
    "compared": ("C = {'big': 'no'}\n", "8 if C['big'] == 'yes' else 3", "'m'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OWN_FIELDS)
def test_settings_that_a_program_keeps_together_are_read(tmp_path: Path, kind: str) -> None:
    before, batch, name = OWN_FIELDS[kind]
    text = f"Trainer({LOADER}({name}), TrainingArguments(per_device_train_batch_size={batch}))\n"
    base = read_base(written(tmp_path, before + text))
    assert (base.model, base.config.micro_batch_size) == ("m", 3)
    made = changes(base, base.config, dataclasses.replace(base.config, micro_batch_size=5))
    edited, _, left = base.parts[0].edited(made)
    assert (edited, left) == (before + text.replace(batch, "5"), [])


@pytest.mark.parametrize(
    "before",
    ["C = {'b': 8, 'm': C}\n", "class C:\n  b = C.b\n", "def f(b=b):\n  pass\nf()\nb = f\n"],
)
def test_what_asks_for_itself_has_no_value(tmp_path: Path, before: str) -> None:
    asked = "C if C else C.b" if "C" in before else "b"
    text = (
        f"{before}Trainer({LOADER}('m'), TrainingArguments(per_device_train_batch_size={asked}))\n"
    )
    with pytest.raises(ConfigError, match=r"must be a whole number|is not a literal"):
        read_base(written(tmp_path, text))


LOADS = """
parser.add_argument("--config", default="run.yaml")
with open(parser.parse_args().config) as f:
    config = yaml.safe_load(f)
lora = config["lora"]
m = AutoModelForCausalLM.from_pretrained(config["model"])
LoraConfig(r=lora["r"], target_modules=lora.get("modules", "all-linear"))
Trainer(m, TrainingArguments(per_device_train_batch_size=config["training"]["batch"]))
"""


def test_settings_of_the_file_that_a_program_loads_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, LOADS)
    with pytest.raises(ConfigError, match="is not a literal"):
        read_base(path)
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nlora: {r: 4}\ntraining: {batch: 3, learning_rate: 1e-4}\n", "utf-8")
    base = read_base(path)
    read = (
        base.model,
        base.config.lora_rank,
        base.config.lora_targets,
        base.config.micro_batch_size,
    )
    assert read == ("m", 4, "all-linear", 3)
    assert "what it loads is read in run.yaml" in base.notes
    made = changes(base, base.config, dataclasses.replace(base.config, micro_batch_size=5))
    edited, _, left = base.parts[0].edited(made)
    assert (edited, left) == (LOADS.replace('config["training"]["batch"]', "5"), [])
    path.write_text(f"{LOADS}config['training']['batch'] = 4\n", "utf-8")
    with pytest.raises(ConfigError, match="is not a literal"):
        read_base(path)


@pytest.mark.parametrize(
    "text",
    [
        "C = {'batch': 3}\nC['batch'] = x\nb = C['batch']",
        "C = {'batch': 3}\nC.update(x)\nb = C['batch']",
        "class C:\n  batch = 3\nc = C()\nc.batch = x\nb = c.batch",
        "f(3)\nf(4)\ndef f(c=2):\n  b = c",
        "f(**x)\ndef f(c=2):\n  b = c",
        "f()\ntry_all(f)\ndef f(c=2):\n  b = c",
        "f()\ndef f(c=2):\n  c = 3\n  b = c",
        "class C:\n  batch = 3\nc = C(**x)\nb = c.batch",
        "class C:\n  batch = 3\nc = C(batch=2)\nd = C(batch=4)\nb = c.batch",
        "@dataclass\nclass C:\n  batch: int = 3\nc = HfArgumentParser(C).parse()\nb = c.batch",
        "class C:\n  batch = 3\nc = C()\ndef f(c):\n  b = c.batch",
    ],
)
def test_settings_that_may_have_changed_are_not_read(tmp_path: Path, text: str) -> None:
    before, _, asked = text.rpartition("b = ")
    path = written(tmp_path, f"{before}TrainingArguments(per_device_train_batch_size={asked})")
    with pytest.raises(ConfigError, match="is not a literal"):
        read_base(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TrainingArguments(per_device_train_batch_size=args.batch)",
         "per_device_train_batch_size: args.batch (line 1) is not a literal"),
        ("TrainingArguments(bf16=torch.cuda.get_device_capability()[0] >= 8)", "is not a literal"),
        ("B = 2\nB += 2\nTrainingArguments(per_device_train_batch_size=B)", "B (line 3) is not a literal"),
        ("def f():\n  B = 2\ndef g():\n  B = 3\n  TrainingArguments(per_device_train_batch_size=B)",
         "is not a literal"),
        ("def f(B=2):\n  TrainingArguments(per_device_train_batch_size=B)", "is not a literal"),
        ("TrainingArguments(**options)", "line 1: what **options spreads is not a literal"),
        ("o = {'bf16': True}\no['bf16'] = x\nTrainingArguments(**o)", "**o spreads is not a literal"),
        ("TrainingArguments()\nTrainingArguments()", "lines 1, 2 each have one"),
        ("TrainingArguments('out', False)", "TrainingArguments is given values without their names"),
        ("a = TrainingArguments()\na_args = a\na_args.bf16 = True", "line 3: a_args.bf16 is set later"),
        ("a = HfArgumentParser(TrainingArguments)\nTrainingArguments()", "HfArgumentParser"),
        ("TrainingArguments(deepspeed='z.json')", "deepspeed: z.json is no file here or beside it"),
        ("TrainingArguments(deepspeed=True)", "deepspeed: shares the run among GPUs"),
        ("Z = {'zero_optimization': {'stage': 4}}\nTrainingArguments(deepspeed=Z)",
         "deepspeed: zero_optimization.stage: 4 is not predicted"),
        ("TrainingArguments(optim='adamw_tortch')", "unknown optimizer 'adamw_tortch'. Did you mean"),
        ("LoraConfig(r=8)", "adapter target_modules is missing: name the modules, or say by --model"),
        ("m = AutoModelForCausalLM.from_pretrained('m')\nm = get_peft_model(m, mine)",
         "line 2: get_peft_model has an adapter that is not made here"),
        ("SFTTrainer(model='m', args=SFTConfig(), peft_config=made())",
         "line 1: SFTTrainer has an adapter that is not made here"),
        ("AutoModelForCausalLM.from_pretrained('m', quantization_config=made())\nTrainingArguments()",
         "line 1: quantization_config is not made here by BitsAndBytesConfig"),
        ("q = GPTQConfig(4)\nAutoModelForCausalLM.from_pretrained('m', quantization_config=q)\nSFTConfig()",
         "line 2: GPTQConfig: how such weights are trained is not modelled: name the model that it was made"),
        ("a = TrlParser((ScriptArguments, SFTConfig))", "line 1: TrlParser takes settings from the command"),
        ("LoraConfig(r=8, target_modules='.*proj')", "is a pattern of more than whole names: name"),
        ("AutoModelForCausalLM.from_pretrained('m', load_in_4bit=True)\nTrainingArguments()",
         "BitsAndBytesConfig has it"),
        ("model = FastLanguageModel.from_pretrained('m')\nSFTConfig()", "nothing trains"),
        ("pl.Trainer(max_epochs=3, precision='bf16-mixed')\nm = AutoModelForMaskedLM.from_pretrained('m')",
         "line 1: Lightning's Trainer is not read: say what it trains in a train_config.yaml"),
        ("m = SentenceTransformer('m')\nm.fit(train_objectives=[(loader, loss)])",
         "line 1: SentenceTransformer's own fit is not read: SentenceTransformerTrainer is"),
        ("AutoModelForCausalLM.from_pretrained('m').generate()", "nothing in it trains: name the program"),
        ("AutoModelForMultipleChoice.from_pretrained('m')\nTrainingArguments()",
         "line 1: AutoModelForMultipleChoice is for a task that is not predicted: AutoModelForAudioClass"),
        ("import lightning as L\nL.Trainer(max_steps=3)\nm = AutoModelForMaskedLM.from_pretrained('m')",
         "line 2: Lightning's Trainer is not read"),
        ("from setfit import TrainingArguments\nTrainingArguments(batch_size=4)",
         "line 1: TrainingArguments is that of setfit, which is not read"),
        ("a = ORPOConfig(output_dir='o')\nm = AutoModelForCausalLM.from_pretrained('m')",
         "line 1: ORPOConfig is of no trainer that is predicted: of TRL's SFTTrainer, DPOTrainer"),
        ("m = AutoModelForCausalLM.from_pretrained('m')\nTrainer(m, get_arguments())",
         "line 2: Trainer has arguments that are not made here: write them out"),
        ("m = AutoModelForCausalLM.from_pretrained('m')\nORPOTrainer(model=m, args=a)",
         "line 2: ORPOTrainer has arguments that are not made here"),
        ("l = DataLoader(d, batch_size=size, shuffle=True)\nm = AutoModelForCausalLM.from_pretrained('m')",
         "loader batch_size: size (line 1) is not a literal"),
        (f"{LOADED}.half()\n{TRAINED}", "line 1: half casts the model: say dtype='float16' where it"),
        (f"{LOADED}\nm.to(0, torch.bfloat16)\n{TRAINED}", "line 2: to casts the model: say dtype='bfloat16'"),
        (f"{LOADED}\nm = torch.compile(m)\n{TRAINED}", "line 2: compile is not read: say torch_compile=True"),
        (f"{LOADED}\nm.base.requires_grad_(False)\n{TRAINED}", "line 2: it freezes weights"),
        (f"{LOADED}\nfor p in m.parameters():\n  p.requires_grad = False\n{TRAINED}", "line 3: it freezes"),
        (f"apply_liger_kernel_to_llama(rope=False)\n{LOADED}\n{TRAINED}", "line 1: apply_liger_kernel_to_"),
        (f"{LOADED}\n{TRAINED[:-1]}, optimizers=(o, None))", "optimizers=(o, None) is not read: say optim"),
        (f"{LOADED}\n{TRAINED[:-1]}, optimizer_cls_and_kwargs=(SGD, {{}}))", "kwargs=(SGD, {}) is not read"),
        (f"{LOADED}\nm.set_attn_implementation('eager')\n{TRAINED}", "line 2: how attention runs is set"),
        (f"c._attn_implementation = 'eager'\n{LOADED}\n{TRAINED}", "line 1: how attention runs is set later"),
        (f"{LOADED}\nm = PeftModel.from_pretrained(m, 'a')\n{TRAINED}",
         "line 2: PeftModel.from_pretrained has an adapter that is not made here"),
        ("a = TrainingArguments()\na = a.set_training(batch_size=4)", "line 2: a.set_training is set later"),
        ("c = SFTConfig()\nc.packing = True\nSFTTrainer('m', c)", "line 2: c.packing is set later"),
        (f"q = BitsAndBytesConfig(load_in_4bit=True) if other else None\n{LOADED}\n{TRAINED}",
         "line 1: only running tells whether BitsAndBytesConfig is called: write it without the condition"),
        ("print('no training here')", "has no settings that can be read"),
        ("x = (", "is not a Python program. line 1"),
    ],
)  # fmt: skip
def test_every_refusal_says_why(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_base(written(tmp_path, f"{text}\n"))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{LOADED}\nm.resize_token_embeddings(len(t))\n{TRAINED}",
         "line 2: resize_token_embeddings changes the vocabulary"),
        (f"{LOADED}\nm.model.layers = m.model.layers[:8]\n{TRAINED}", "line 2: m.model.layers is set"),
        (f"{LOADED}\nm.lm_head = Cast(m.lm_head)\n{TRAINED}", "line 2: m.lm_head is set, and the model"),
        (f"c.num_hidden_layers = 4\n{LOADED}\n{TRAINED}", "line 1: c.num_hidden_layers is set"),
        (f"c = AutoConfig.from_pretrained('m', n_layer=4)\n{LOADED}\n{TRAINED}", "line 1: n_layer=4 is"),
        (f"{LOADED}\ne = copy.deepcopy(m)\n{TRAINED}", "line 2: deepcopy makes a further model"),
        (f"{LOADED}\n{TRAINED[:-1]}, compute_loss_func=loss)", "line 2: compute_loss_func makes the loss"),
        (f"{LOADED}\nfully_shard(m)\n{TRAINED}", "line 2: fully_shard shares the model out"),
        (f"{LOADED}\nm = torch.nn.DataParallel(m)\n{TRAINED}", "line 2: DataParallel takes several GPUs"),
        (f"torch.backends.cuda.enable_flash_sdp(False)\n{LOADED}\n{TRAINED}", "line 1: enable_flash_sdp"),
        (f"{LOADED}\n{TRAINED[:-2]}, ddp_bucket_cap_mb=500))", "ddp_bucket_cap_mb: 500 makes DDP's buckets"),
        (f"class Head(Module):\n  def __init__(self):\n    self.hidden_size = 4\n{LOADED}\n{TRAINED}", ""),
        (f"{LOADED}\nm.config.use_cache = False\nm.lm_head.weight.x = 1\n{TRAINED}", ""),
    ],
)  # fmt: skip
def test_what_changes_a_step_beside_the_settings_is_noted(
    tmp_path: Path, text: str, words: str
) -> None:
    notes = read_base(written(tmp_path, f"{text}\n")).notes
    found = [note for note in notes if words and words in note]
    assert len(found) == bool(words)
    assert len(notes) == len(found) + len(
        read_base(written(tmp_path, f"{LOADED}\n{TRAINED}\n")).notes
    )


@pytest.mark.parametrize(
    ("update", "steps"),
    [
        ("opt.step()", 1),
        ("if (n + 1) % 8 == 0:\n    optimizer.step()", 8),
        ("if n % EVERY == 0 or n == last:\n    scaler.step(optimizer)", 4),
        ("opt.step()\n  if n % 100 == 0:\n    scheduler.step()\n    print(n)", 1),
        # Only running would tell: of 32 samples a step by micro-batches of 2.
        ("if n % every == 0:\n    opt.step()", 16),
        ("accumulated += 1\n  opt.step()", 16),
    ],
)
def test_micro_steps_of_a_loop_are_those_between_its_updates(
    tmp_path: Path, update: str, steps: int
) -> None:
    text = (
        f"EVERY = 4\n{LOADED}\nopt = torch.optim.AdamW(m.parameters())\n"
        f"for n, batch in enumerate(DataLoader(d, batch_size=2)):\n  m(**batch).loss.backward()\n  {update}\n"
    )
    config = read_base(written(tmp_path, text), samples=32).config
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == (2, steps)


@pytest.mark.parametrize(
    ("line", "precision"),
    [
        ("torch.set_float32_matmul_precision('high')", "tf32"),
        ("torch.set_float32_matmul_precision('highest')", "fp32"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
        ("torch.backends.cudnn.allow_tf32 = True", "fp32"),
    ],
)
def test_products_that_a_program_lets_run_as_tf32(
    tmp_path: Path, line: str, precision: str
) -> None:
    loaded = "m = AutoModelForCausalLM.from_pretrained('m', dtype='float32')"
    assert (
        read_base(written(tmp_path, f"{line}\n{loaded}\n{TRAINED}\n")).config.precision == precision
    )
    decided = TRAINED.replace("'o'", "'o', tf32=False")
    text = f"{line}\n{loaded}\n{decided}\n"
    assert read_base(written(tmp_path, text)).config.precision == "fp32"


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("1", 1),
        ("-0.5", -0.5),
        ("('a', 'b')", ["a", "b"]),
        ("{'b', 'a'}", ["a", "b"]),
        ("dict(x=1)", {"x": 1}),
        ("torch.bfloat16", "bfloat16"),
        ("torch.half", "float16"),
        ("is_bfloat16_supported()", True),
        ("not torch.cuda.is_bf16_supported()", False),
        ("torch.cuda.is_available()", True),
        ("BF16", True),
        ("torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16", "bfloat16"),
        ("'fp32' if not torch.cuda.is_available() else {'x': torch.float16}", {"x": "float16"}),
        ("1 if other() else 2", NotLiteral("", 0)),
        ("1 if 3 else 2", NotLiteral("", 0)),
        ("NAME", "m"),
        ("other.bfloat16", NotLiteral("", 0)),
        ("16 // SIZE", 4),
        ("SECOND", 2),
        ("2 * (SIZE + 1) - 1e-5", 9.99999),
        ("SIZE / 0", NotLiteral("", 0)),
        ("SIZE ** SIZE", NotLiteral("", 0)),
        ("NAME * SIZE", NotLiteral("", 0)),
        ("ITSELF", NotLiteral("", 0)),
        ("b'x'", NotLiteral("", 0)),
        ("'\\ud800'", NotLiteral("", 0)),
        ("f'{x}'", NotLiteral("", 0)),
        ("os.environ['X']", NotLiteral("", 0)),
    ],
)
def test_values(source: str, value: object) -> None:
    found = program.parsed(
        "NAME = 'm'\nSIZE = 4\nFIRST, SECOND = 1, 2\nITSELF = ITSELF + 1\nBF16 = is_bf16_supported()\n"
        f"TrainingArguments(x={source})\n"
    )
    assert found.content["x"] == value


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("'--x', type=int, default=4", 4),
        ("'-x', type=int, default=-4", -4),
        ("'-b', '--x', default=[1, 2]", [1, 2]),
        ("'--my-x', dest='x', type=str, default='m'", "m"),
        ("'--x', action='store_true'", False),
        ("'--no-x', dest='x', action='store_false'", True),
        ("'--x', type=int", None),
        ("'--x', type=int, required=True, default=4", NotLiteral("", 0)),
        ("'--x', type=int, default='4'", NotLiteral("", 0)),
        ("'--x', default=SIZE", NotLiteral("", 0)),
        ("'x', default=4", NotLiteral("", 0)),
        ("'--y', default=4", NotLiteral("", 0)),
        ("'--x', default=4)\nargs.x = 5\nf(", NotLiteral("", 0)),
        ("'--x', default=4)\nargs = other(", NotLiteral("", 0)),
        ("'--x', default=4)\nparser.set_defaults(x=5", NotLiteral("", 0)),
    ],
)
def test_options_of_argparse_have_their_defaults(option: str, value: object) -> None:
    text = (
        f"parser = ArgumentParser()\nparser.add_argument({option})\n"
        "args = parser.parse_args()\ndef main():\n    TrainingArguments(x=args.x)\n"
    )
    found = program.parsed(text)
    assert found.content["x"] == value
    is_taken = not isinstance(value, NotLiteral)
    assert any(f"at their defaults: x={value}" in note for note in found.notes) == is_taken
    if is_taken:
        edit = KeyEdit(key="x", value=8)
        assert program_edit.edited(text, [edit]) == (text.replace("x=args.x", "x=8"), [])


@pytest.mark.parametrize(
    "text",
    [
        "x=1\0",
        "x=" + "(" * 100_000,
        "x=" + "-" * 100_000 + "1",
        "x=" + "1+" * 60_000 + "1",
        "x=a" + ".a" * 60_000,
        "".join(" " * depth + "if 1:\n" for depth in range(200)),
        "x=" + "9" * 5000,
        "x" * 300_000,
        "TrainingArguments(x=" + "[" * 150 + "]" * 150 + ", " + "y" * 10_000 + "=1)" + ")",
    ],
    ids=[
        "nul",
        "parentheses",
        "minus",
        "plus",
        "attributes",
        "indents",
        "digits",
        "large",
        "broken",
    ],
)
def test_hostile_programs_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError) as raised:
        read_base(written(tmp_path, text))
    assert "is not a Python program" in str(raised.value)
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)
    assert time.process_time() - start < 10


def test_hostile_names_in_a_program_are_cut(tmp_path: Path) -> None:
    for value in ("f" * 10_000, "'" + "<script>\\n" * 1000 + "'", "x[" + "'y'" * 1000 + "]"):
        with pytest.raises(ConfigError) as raised:
            read_base(written(tmp_path, f"TrainingArguments(optim={value})\n"))
        assert len(str(raised.value)) < 500
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"', True),
        (
            'os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", '
            '"max_split_size_mb:64, expandable_segments:True")',
            True,
        ),
        ('os.environ |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}', True),
        ('os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:64"', False),
        ('os.environ["OTHER"] = "expandable_segments:True"', False),
    ],
)
def test_a_program_tells_torchs_allocator(tmp_path: Path, line: str, expected: bool) -> None:
    text = (BASES / "qlora.py.txt").read_text(encoding="utf-8")
    run = read_base(written(tmp_path, f"import os\n{line}\n{text}"))
    assert run.config.expandable_segments is expected
    assert mapping_write.allows(run.target, run.config.method, "expandable_segments", expected)
    assert not mapping_write.allows(
        run.target, run.config.method, "expandable_segments", not expected
    )


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", "fp8-mixed"), ("bfloat16", "fp8-autocast"), (None, "fp8-autocast")],
)
def test_a_program_tells_accelerate_of_fp8(
    tmp_path: Path, dtype: str | None, precision: str
) -> None:
    loaded = f', dtype="{dtype}"' if dtype else ""
    text = f"""
import os
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
model = AutoModelForCausalLM.from_pretrained("m"{loaded})
trainer = Trainer(model=model, args=TrainingArguments("out", per_device_train_batch_size=2))
trainer.train()
"""
    assert read_base(written(tmp_path, text)).config.precision == precision


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("True", True),
        ("0", False),
        ("not X", False),
        ("X == 4", True),
        ("X == 5", False),
        ("X != 4", False),
        ("X != 5", True),
        ("NOTHING is None", True),
        ("NOTHING is not None", False),
        ("X is not None", True),
        ('__name__ == "__main__"', True),
        # Only running would tell.
        ("X < 5", None),
        ("X == unknown()", None),
        ("not unknown()", None),
        ("1 < X < 5", None),
        # What asks the arguments adds nothing to what they say.
        ("args.gradient_checkpointing", False),
    ],
)
def test_a_condition_holds_where_that_is_known_unrun(condition: str, holds: bool | None) -> None:
    found = program.parsed("X = 4\nNOTHING = None\n")
    test = ast.parse(condition, mode="eval").body
    assert conditions.holds_in(found, test) is holds
