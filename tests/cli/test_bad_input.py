"""Whatever is wrong: one clear message, its exit code, no traceback, and nothing stored is lost."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import answers
import here
import optuna
import pytest
from fake_nvml import fake_nvml
from optuna_storage import unpooled

from autotune import cli
from autotune.catalogue import gpus, models
from autotune.common.units import GIB
from autotune.errors import ConfigError
from autotune.export.samples.formats import Columns
from autotune.export.samples.read import read_samples
from autotune.export.samples.values import UnusableData
from autotune.search import predict_best
from autotune.space import adapters
from autotune.store.database import PREFIX

pytestmark = pytest.mark.worker

ROOT = Path(__file__).parents[2]
FIND = ("find", "--model", "qwen2.5-1.5b", "--gpu-mem", "12GB")
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}

DETECT = gpus.detect

Fail = Callable[..., tuple[int, str]]


@pytest.fixture
def fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Fail:
    """Run a command that must fail; return its exit code and its one message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.catalogue.gpus.detect", list)

    def invoke(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        err = capsys.readouterr().err
        check_message(err)
        return int(ended.value.code or 0), err

    return invoke


def check_message(err: str) -> None:
    """One message and nothing that looks like a crash."""
    assert "Traceback" not in err
    assert "internal error" not in err
    lines = err.splitlines()
    # Progress may come before it. An option's error is click's, below a line of usage.
    assert [line.startswith("error: ") for line in lines].index(True) == len(lines) - 1
    assert all(line.isprintable() for line in lines)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search answers at once; what comes after it is on trial."""
    monkeypatch.setattr(
        predict_best,
        "find",
        lambda model, workload, space, gpu, **rest: answers.prediction(
            workload=workload, gpu=gpu.name
        ),
    )


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("--gpu-mem", "0GB"), 2, ("'0GB' is not positive", "12GB")),
        (("--gpu-mem", "-3GB"), 2, ("'-3GB' is not positive",)),
        (("--gpu-mem", "9999TB"), 2, ("more than 1 PB",)),
        (("--gpu-mem", "900GB"), 2, ("No single GPU known here has",)),
        (("--gpu-mem", "lots"), 2, ("'lots' is not a size", "Write a number and a unit")),
        (("--gpu-mem", "12"), 2, ("has no unit",)),
        (("--cards", "0"), 2, ("--cards '0' is no number of cards", "or all")),
        (("--cards", "two"), 2, ("--cards 'two' is no number of cards",)),
        (("--on", "auto", "--backend", "predict"), 2, ("A prediction needs no cluster",)),
        (("--on", "auto", "--backend", "cpu", "--gpu", "t4"), 2, ("--gpu does not go with",)),
        (("--gpu-mem", "12gig"), 2, ("unknown unit 'gig'",)),
        (("--gpu-mem", "nanGB"), 2, ("is not a size",)),
        (("--gpu-mem", "12GB\n\x1b[31m"), 2, ("is not a size",)),
        (("--gpu", "rtx-4071"), 2, ("Unknown GPU 'rtx-4071'", '"rtx-4070"', "autotune gpus")),
        (("--gpu", "rtx-4070", "--gpu-mem", "24GB"), 2, ("22.35 GiB", "11.49 GiB")),
        (("--gpu", "mi300x"), 3, ("does not run CUDA", "autotune gpus")),
        (("--space", "defualt"), 2, ("no search space 'defualt'", '"default"')),
        (("--method", "qlroa"), 2, ("--method", "'full', 'lora', 'qlora'")),
        (("--allow", "all"), 2, ("--allow",)),
        (("--seq-len", "0"), 2, ("--seq-len",)),
        (("--seq-len", "1"), 2, ("one token trains nothing", "--seq-len 2 or more")),
        (("--effective-batch", "-1"), 2, ("--effective-batch",)),
        (("--num-gpus", "3"), 2, ("3 GPUs cannot share", "--effective-batch 33")),
        (("--method", "vera"), 2, ("default has no section for vera", "Give --space adapters")),
        (("--method", "peft"), 2, ("default has no section for peft", "Give --peft with a file")),
        (("--method", "qlora", "--space", "full"), 2, ("It has full", "default or everything")),
        (("--effective-batch", "1e3"), 2, ("--effective-batch",)),
        (("--headroom", "99GB"), 2, ("--headroom 99GB leaves nothing of the budget",)),
        (("--base", "nowhere.yaml"), 2, ("nowhere.yaml cannot be read",)),
        (("--base", "."), 2, ("cannot be read",)),
        (("--speed", "high"), 2, ("--speed",)),
    ],
)
def test_options_of_find(
    fail: Fail, arguments: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    ended, err = fail(*FIND, *arguments)
    assert ended == code
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--checkpointing", "every-0"), "none, full, every-N"),
        (("--optimizer", "adamw_torh"), "adamw_torch"),
        (("--optimizer", "adamw"), "'--optimizer': unknown optimizer 'adamw'. Did you mean"),
        (("--optimizer", "adamw_apex_fused"), "adamw_torch_fused computes the same"),
        (("--optimizer", "adamw_torch_xla"), "runs on XLA devices"),
        (("--precision", "bf16"), "bf16-true"),
        (("--quantization", "nf4"), "they need an adapter, which is method qlora"),
        (("--rank", "8"), "rank and targets have no meaning"),
        (("--method", "lora", "--targets", "a;b"), "'a;b' must be all-linear, attention, or"),
        (("--method", "lora", "--virtual-tokens", "8"), "its own method's settings and no others"),
        (("--method", "peft"), "a --peft file"),
        (("--lora-dropout", "0.1"), "rank and targets have no meaning"),
        (("--method", "vera", "--lora-dropout", "0.1"), "its own method's settings and no others"),
        (("--method", "lora", "--lora-dropout", "1"), "must be a number from 0 to below 1"),
        (("--vllm", "nan"), "must be a number from 0 to below 1"),
        (("--method", "lora", "--lora-dropout", "a"), "must be a number from 0"),
        (("--peft", "absent.yaml"), "absent.yaml cannot be read. No such file"),
        (("--peft", "."), ". cannot be read"),
        (("--offload",), "the input of a checkpointed layer"),
        (("--checkpointing", "every-99"), "fewer layers than the checkpointing interval"),
        (("--gpu", "t4", "--precision", "bf16-true"), "need compute capability 8.0"),
        (("--parallelism", "fsdp2"), "one GPU has nobody to share with"),
        (("--num-gpus", "2", "--parallelism", "none"), "several GPUs share a run in one of"),
        (("--num-gpus", "99"), "99 is not in the range"),
    ],
)
def test_options_of_estimate(fail: Fail, arguments: tuple[str, ...], part: str) -> None:
    ended, err = fail("estimate", "--model", "qwen2.5-1.5b", "--gpu", "rtx-4070", *arguments)
    assert ended == 2
    assert part in err


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("peft_type: [", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("- 1", "must be a mapping with a peft_type"),
        ("r: 8", "must be a mapping with a peft_type"),
        ("{peft_type: LORA, r: .nan}", "must be made of text, numbers, lists and mappings"),
        ("{peft_type: LORA, since: 2024-01-01}", "must be made of text, numbers"),
        ("{peft_type: LORA, x: &a [*a]}", "must be made of text, numbers"),
        (f"{{peft_type: LORA, x: {'y' * 30_000}}}", "must have 20,000 characters at most"),
        ("{peft_type: LORA, megatron_config: {a: 1}}", "must do without megatron_config"),
    ],
)
def test_files_of_peft(fail: Fail, content: str, part: str) -> None:
    Path("adapter.yaml").write_text(content, encoding="utf-8")
    where = ("--model", "qwen2.5-1.5b", "--gpu", "rtx-4070")
    ended, err = fail("estimate", *where, "--peft", "adapter.yaml")
    assert ended == 2
    assert part in err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{peft_type: LORRA}", 'PEFT has no type LORRA. Did you mean "LORA"'),
        ("{peft_type: LORA, lora_dropuot: 1}", 'Did you mean "lora_dropout"'),
        ("{peft_type: LORA, target_modules: [nowhere]}", "PEFT cannot add its LORA adapter"),
        ("{peft_type: LORA, r: 0, target_modules: all-linear}", "LORA adapter (ValueError: `r`"),
        ("{peft_type: LORA, task_type: SEQ_CLS}", "task_type is not that of causal-lm"),
        ("{peft_type: SHIRA, r: 4, target_modules: [q_proj]}", "PEFT cannot add its SHIRA"),
    ],
)
def test_what_peft_refuses(fail: Fail, content: str, part: str) -> None:
    Path("adapter.yaml").write_text(content, encoding="utf-8")
    Path("config.json").write_text(json.dumps(TINY), encoding="utf-8")
    where = ("--model", "config.json", "--gpu", "rtx-4070", "--seq-len", "64")
    ended, err = fail("estimate", *where, "--peft", "adapter.yaml")
    assert ended == 2
    assert part in err


def test_no_model_and_no_budget(fail: Fail) -> None:
    assert fail("find", "--gpu-mem", "12GB")[0] == 2
    code, err = fail("find", "--model", "qwen2.5-1.5b")
    assert code == 2
    assert "There is no memory budget" in err


@pytest.mark.parametrize(
    ("error", "part"),
    [
        ("NVML Shared Library Not Found", "NVIDIA's driver is not installed"),
        ("Driver Not Loaded", "installed, and not loaded"),
        ("", "finds no card"),
    ],
)
def test_probes_on_cuda_without_a_card(
    fail: Fail, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, part: str
) -> None:
    fake_nvml(monkeypatch, [], error=error)
    code, err = fail(*FIND, "--backend", "cuda")
    assert code == 3
    assert part in err
    assert "Leave --backend out" in err
    assert not list(tmp_path.iterdir())


def test_probes_on_a_card_that_others_use(
    fail: Fail, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_nvml(
        monkeypatch,
        ["NVIDIA L4"],
        total_bytes=24 * GIB,
        used_bytes=20 * GIB,
        compute=[(4711, 20 * GIB)],
        programs={4711: "/usr/bin/python3"},
    )
    monkeypatch.setattr("autotune.catalogue.gpus.detect", DETECT)
    code, err = fail(*FIND, "--backend", "cuda")
    assert code == 3
    assert "--gpu-mem 12GB is not free" in err
    assert "3.76 GiB of its 23.76 GiB are free" in err
    assert "python3 (process 4711, 20.00 GiB)" in err
    code, err = fail("find", "--model", "qwen2.5-1.5b", "--backend", "cuda", "--gpu-mem", "80GB")
    assert code == 3
    assert "more than the card has" in err
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_gets_the_nearest_names(fail: Fail) -> None:
    code, err = fail("find", "--model", "qwen2.5-1.6b", "--gpu-mem", "12GB")
    assert code == 2
    assert '"Qwen2.5-1.5B"' in err


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-", "a/b--c", "a/b..c", "a./b", "a/b.git"])
@pytest.mark.parametrize("asks_hub", [True, False])
def test_a_name_that_the_hub_does_not_allow(name: str, asks_hub: bool) -> None:
    with pytest.raises(ConfigError, match="no Hub id"):
        models.resolve(name, asks_hub=asks_hub)


def test_a_name_cannot_imitate_other_output(fail: Fail) -> None:
    code, err = fail("find", "--model", "x\nerror: fine\x1b[2J\u202e", "--gpu-mem", "12GB")
    assert code == 2
    assert "\x1b" not in err


@pytest.mark.parametrize("offline", ["1", ""])
def test_no_network(tmp_path: Path, offline: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "autotune", *FIND[:2], "nobody/knows-this", "--gpu-mem", "12GB"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": offline,
            # A port that nobody listens on: discard, and never the network.
            "HF_ENDPOINT": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    check_message(ran.stderr)
    assert "could not be fetched" in ran.stderr
    assert "give a folder or file that has its config.json" in ran.stderr


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b'{"model_type": "llama",', "Line 1"),
        (b"", "is not a JSON object"),
        (b"[1, 2]", "holds a list"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{}", "no model_type"),
        (b'{"model_type": 5}', "no model_type"),
        (b'{"a": "' + b"x" * 2**21 + b'"}', "is larger than 1.0 MiB"),
        (b'{"auto_map": {"AutoConfig": "evil.Config"}}', "never runs here"),
        (b'{"model_type": "llama", "num_hidden_layers": 99999999}', "99,999,999 layers"),
        (b'{"model_type": "llama", "num_hidden_layers": 9999}', "9,999 layers"),
        (b'{"model_type": "mpt", "n_layers": 9999}', "9,999 layers"),
        (b'{"model_type": "llama", "hidden_size": 1000000000}', "has hidden_size 1,000,000,000"),
        (b'{"model_type": "llama", "hidden_size": 100000000}', "has hidden_size 100,000,000"),
        (b'{"model_type": "gpt2", "n_embd": 100000000}', "has n_embd 100,000,000"),
        (
            b'{"model_type": "x", "text_config": {"vocab_size": 100000000}}',
            "has vocab_size 100,000,000",
        ),
    ],
)
def test_a_configuration_that_is_none(
    fail: Fail, tmp_path: Path, content: bytes, part: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    code, err = fail("find", "--model", str(tmp_path), "--gpu-mem", "12GB")
    assert code == 2
    assert part in err


def test_remote_code_does_not_run(fail: Fail, tmp_path: Path) -> None:
    """The trace's own process: it is the one that has Transformers."""
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\nclass Config: pass\n"
    for name in ("evil.py", "configuration_evil.py", "torch.py"):
        (tmp_path / name).write_text(code, encoding="utf-8")
    ended, err = fail("estimate", "--model", str(tmp_path), "--gpu", "rtx-4070")
    assert ended == 2
    assert "its remote code is never run" in err
    assert not (tmp_path / "ran").exists()


SPACE = "methods:\n  full:\n    micro_batch_size: [1]\n    precision: [bf16-true]\n"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (SPACE + "    optimiser: [sgd]\n", ("unknown key", '"optimizer"')),
        (SPACE + "    optimizer: sgd\n", ("methods.full.optimizer: must be a list",)),
        (SPACE + "    optimizer: [1]\n", ("must be a name, not 1",)),
        (SPACE + "    optimizer: !!python/object/apply:os.system [id]\n", ("tag",)),
        ("methods: {full: [", ("is not YAML", "line 1")),
        ("\x00", ("is not YAML",)),
        ("- 1", ("must be a mapping",)),
    ],
)
def test_a_space_that_is_none(
    fail: Fail, tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    (tmp_path / "space.yaml").write_text(text, encoding="utf-8")
    code, err = fail(*FIND, "--space", "space.yaml")
    assert code == 2
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("version: 1\nconfig: {method: full, speed: 9}\n", "config.speed is unknown"),
        ("version: 1\nconfig: {method: 3}\n", "config.method is of type int"),
        ("version: 9\nconfig: {}\n", "A newer autotune wrote it"),
        ("config: !!python/name:os.system x\n", "is not a YAML document"),
    ],
)
def test_a_base_that_is_none(fail: Fail, tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "base.yaml").write_text(text, encoding="utf-8")
    code, err = fail(*FIND, "--base", "base.yaml")
    assert code == 2
    assert part in err


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("base.py", b"x = (", "base.py is not a Python program. line 1"),
        ("base.py", b"x = 1\0", "base.py is not a Python program"),
        ("base.py", b"TrainingArguments(**options)", "what **options spreads is not a literal"),
        ("base.py", b"TrainingArguments(bf16=" + b"f" * 10_000 + b")", "bf16: ffff"),
        ("base.py", b"# " + b"x" * 2**20, "base.py is larger than 1 MiB"),
        ("base.json", b'{"peft_type": "LORA", "r": [8]}', "adapter r must be a whole number, not a list"),
        ("base.json", b'{"load_in_4bit": "yes please"}', "load_in_4bit: yes please"),
        ("base.json", b'{"zero_optimization": [3]}', "zero_optimization must be a mapping"),
        ("base.yaml", b"num_processes: many\ndistributed_type: NO\n", "num_processes must be a whole"),
        ("base.yaml", b"model: {_component_: torchtune.x}\nbatch_size: {}\n", "batch_size must be a"),
        ("base.yaml", b"optim: &a [*a]\n", "is not a YAML document. It is nested too deeply"),
        ("base.yaml", b"\xff\xfe", "base.yaml is not UTF-8 text"),
    ],
)  # fmt: skip
def test_a_base_of_another_trainer_that_is_none(
    fail: Fail, tmp_path: Path, name: str, content: bytes, part: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, err = fail(*FIND, "--base", name)
    assert code == 2
    assert part in " ".join(err.split())
    assert len(err) < 3000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--task", "distillation"), "needs a teacher. Nothing names the model"),
        (("--teacher", "Qwen/Qwen2.5-7B"), "has 152,064 entries and the student's 151,936"),
        (("--teacher", "./nowhere.json"), "No such file or folder: './nowhere.json'"),
        (("--teacher", "unsloth/Llama-3.2-1B-bnb"), "Llama-3.2-1B-bnb could not be fetched"),
        (("--teacher", "qwen2.5-0.5b", "--task", "dpo"), "does not go with --task dpo"),
    ],
)
def test_a_teacher_that_is_none(fail: Fail, options: tuple[str, ...], said: str) -> None:
    code, err = fail(*FIND, *options)
    assert code == 2
    assert said in " ".join(err.split())
    assert len(err) < 3000


@pytest.mark.parametrize(
    ("text", "task", "said"),
    [
        ("beta: 0.1", (), "say --task dpo or kto or grpo or rloo or distillation"),
        (
            "use_vllm: true\nvllm_tensor_parallel_size: 2",
            ("--task", "grpo"),
            "use_vllm with this vllm_tensor_parallel_size is not predicted",
        ),
        ("num_generations: 4", ("--task", "rloo"), "it has two at least"),
        ("loss_type: kto", ("--task", "dpo"), "it is a file of KTOConfig: --task kto"),
        (
            "gradient_accumulation_steps: 4",
            ("--task", "kto"),
            "a micro-batch has two samples at least",
        ),
    ],
)
def test_a_base_of_preferences_that_does_not_fit(
    fail: Fail, tmp_path: Path, text: str, task: tuple[str, ...], said: str
) -> None:
    content = f"max_length: 512\nper_device_train_batch_size: 1\n{text}\n"
    (tmp_path / "mine.yaml").write_text(content, encoding="utf-8")
    code, err = fail(*FIND, *task, "--base", "mine.yaml")
    assert code == 2
    assert said in " ".join(err.split())


@pytest.mark.parametrize(
    "value", ["!!timestamp x", "!!bool x", '!!int ""', "2024-99-99", f"0x{'f' * 400}"]
)
@pytest.mark.parametrize("option", ["--space", "--base", "--peft", "nightly"])
def test_a_value_that_is_not_what_its_tag_says(
    fail: Fail, tmp_path: Path, option: str, value: str
) -> None:
    (tmp_path / "file.yaml").write_text(f"a: 1\nb: [{value}]\n", encoding="utf-8")
    start = ("nightly",) if option == "nightly" else (*FIND, option)
    code, err = fail(*start, "file.yaml")
    assert code == 2
    assert "cannot be read as" in err


def test_a_number_of_400_digits(fail: Fail, tmp_path: Path) -> None:
    text = f'{{"peft_type": "LORA", "r": 8, "lora_alpha": {"9" * 400}}}'
    (tmp_path / "base.json").write_text(text, encoding="utf-8")
    code, err = fail(*FIND, "--base", "base.json")
    assert code == 2
    assert "is a number of 400 digits" in err


@pytest.mark.parametrize("name", ["num_gpus", "dataloader_prefetch_factor", "loss_mini_batches"])
def test_a_base_with_less_than_there_can_be(fail: Fail, tmp_path: Path, name: str) -> None:
    text = (
        "version: 1\nconfig: {method: full, micro_batch_size: 1, gradient_accumulation_steps: 1, "
        f"sequence_length: 64, precision: bf16-true, optimizer: sgd, {name}: 0}}\n"
    )
    (tmp_path / "base.yaml").write_text(text, encoding="utf-8")
    code, err = fail(*FIND, "--base", "base.yaml")
    assert code == 2
    assert f"config.{name} is 0 and should be at least 1" in err


@pytest.mark.parametrize("name", ["effort", "space"])
def test_a_night_with_a_setting_that_is_nothing(fail: Fail, tmp_path: Path, name: str) -> None:
    (tmp_path / "night.yaml").write_text(f"models: [gpt2]\n{name}: null\n", encoding="utf-8")
    code, err = fail("nightly", "night.yaml", "--dry-run", "--backend", "cpu")
    assert code == 2
    assert f"{name} is nothing" in err


def test_a_night_with_a_base_that_is_no_path(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "night.yaml").write_text("models: [gpt2]\nbase: [1]\n", encoding="utf-8")
    code, err = fail("nightly", "night.yaml", "--dry-run", "--backend", "cpu")
    assert code == 2
    assert "base is [1]. It should be a text, not list" in err


LONG = "n" * 300
"""No file can be called that."""


@pytest.mark.parametrize(
    ("storage", "part"),
    [
        (f"sqlite:///{LONG}.db", "File name too long"),
        (f"sqlite:///{LONG}/x.db", "File name too long"),
        ("sqlite:///\udcff.db", "It is not UTF-8 text"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        FIND,
        ("studies", "list"),
        ("report", "x"),
        ("studies", "show", "x"),
    ],
)
def test_a_database_that_no_file_can_be(
    fail: Fail,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    storage: str,
    part: str,
) -> None:
    """`find` says it before the search."""
    monkeypatch.setattr(predict_best, "find", lambda *_, **__: pytest.fail("searched"))
    code, err = fail(*command, "--storage", storage)
    assert code == 6
    assert part in err


def test_a_night_that_no_file_can_be(fail: Fail) -> None:
    code, err = fail("nightly", LONG, "--dry-run")
    assert code == 2
    assert "There is no matrix" in err


@pytest.mark.parametrize(
    ("name", "why"), [(LONG, "File name too long"), (f"{LONG}.json", "no such file")]
)
def test_a_dataset_that_no_file_can_be(name: str, why: str) -> None:
    with pytest.raises(UnusableData, match=why):
        read_samples(name, Columns(None, None, None), "causal-lm")


def test_the_name_of_a_dataset_that_no_file_can_be(fail: Fail) -> None:
    code, err = fail("estimate", "--model", "gpt2", "--gpu", "t4", "--dataset", LONG)
    assert code == 2
    assert "cannot be used. It cannot be read" in err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", 5),
        ("layer_types", {"a": 1}),
        ("sliding_window", [1]),
        ("sliding_window", -5),
        ("sliding_window", True),
        ("num_key_value_heads", "2"),
        ("num_key_value_heads", 1.5),
        ("head_dim", {}),
        ("max_window_layers", "x"),
    ],
)
def test_a_cache_of_a_configuration_with_wrong_types(
    fail: Fail, tmp_path: Path, key: str, value: object
) -> None:
    config = {**TINY, "model_type": "qwen2", "use_sliding_window": True, key: value}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, err = fail("estimate", "--model", "config.json", "--gpu", "rtx-4070", "--kv-cache")
    assert code == 2
    assert f"{key} of the configuration is {value!r}" in err


def test_a_cache_of_a_part_for_text_that_names_no_family(fail: Fail, tmp_path: Path) -> None:
    text = {key: value for key, value in TINY.items() if key != "model_type"}
    config = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, err = fail("estimate", "--model", "config.json", "--gpu", "rtx-4070", "--kv-cache")
    assert code == 2
    assert "The KV cache of a model without a model_type is not modelled" in err


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_latent_cache_of_a_configuration_with_wrong_types(
    fail: Fail, tmp_path: Path, model_type: str
) -> None:
    config = {**TINY, "model_type": model_type, "kv_lora_rank": None, "qk_rope_head_dim": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, err = fail("estimate", "--model", "config.json", "--gpu", "rtx-4070", "--kv-cache")
    assert code == 2
    assert "The configuration has no kv_lora_rank" in err


@pytest.mark.usefixtures("forked_workers")
def test_a_model_that_no_machine_holds(fail: Fail, tmp_path: Path) -> None:
    config = {**TINY, "hidden_size": 2_000_000}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, err = fail("estimate", "--model", str(tmp_path), "--gpu", "rtx-4070", "--seq-len", "64")
    assert code == 2
    assert "parameters are more than any machine holds" in err


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("peft_type: hra\nr: 2000", "must have at most 64 as its r: each is run"),
        ("peft_type: p_tuning\nencoder_num_layers: 100000", "at most 64 as its encoder_num_layers"),
        (
            "peft_type: oft\nnum_cayley_neumann_terms: 65",
            "at most 64 as its num_cayley_neumann_terms",
        ),
        ("peft_type: loha\nr: 100000000000", "must have at most 10,000,000 as its r"),
        ("peft_type: loha\nrank_pattern: {q_proj: 20000000}", "at most 10,000,000 as its q_proj"),
    ],
)
def test_a_peft_file_that_would_take_minutes(
    fail: Fail, tmp_path: Path, fields: str, problem: str
) -> None:
    (tmp_path / "peft.yaml").write_text(f"{fields}\n", encoding="utf-8")
    code, err = fail("estimate", "--model", "gpt2", "--gpu", "rtx-4070", "--peft", "peft.yaml")
    assert code == 2
    assert problem in err


@pytest.mark.parametrize(
    "words",
    [("find", "--effective-batch"), ("estimate", "--accumulation"), ("max", "--accumulation")],
)
def test_more_micro_batches_than_are_replayed_in_seconds(
    fail: Fail, words: tuple[str, ...]
) -> None:
    code, err = fail(*words, "100001", "--model", "gpt2", "--gpu", "rtx-4070")
    assert code == 2
    assert "1<=x<=100000" in err


def test_a_seed_in_a_peft_file_may_be_any_number() -> None:
    text = adapters.read_peft({"peft_type": "FOURIERFT", "random_loc_seed": 2**40})
    assert json.loads(text)["random_loc_seed"] == 2**40


def _cut_value(connection: sqlite3.Connection) -> None:
    table = "study_user_attributes"
    query = f"UPDATE {table} SET value_json = substr(value_json, 1, length(value_json) / 2)"
    connection.execute(query)


def _wrong_type(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE study_directions SET direction = x'ff'")


def _wrong_byte(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA writable_schema = ON")
    wrong = "CAST(replace(sql, 'PRIMARY', x'27ff') AS TEXT)"
    connection.execute(f"UPDATE sqlite_master SET sql = {wrong} WHERE name = 'studies'")


def _wrong_state(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE trials SET state = 'x'")


def _no_end(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE trials SET datetime_complete = NULL")


def _endless_number(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE trials SET number = 1e999")


def _deep_value(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE study_user_attributes SET value_json = ?", ("[" * 5000,))


def _wrong_optuna(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE alembic_version SET version_num = ?", ("9" * 5000,))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with a study that has an answer."""
    folder = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.catalogue.gpus.detect", list)
        patch.setattr(
            predict_best,
            "find",
            lambda model, workload, *_, **__: answers.prediction(workload=workload),
        )
        assert here.command(*FIND, "--study", "one", cwd=folder).returncode == 0
    path = folder / "studies" / "autotune.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path.read_bytes()


_READ = (
    ("studies", "list"),
    ("studies", "show", "one"),
    ("report", "one"),
    ("studies", "rm", "one", "--yes"),
)


def _lost_value(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE trial_values SET value = NULL, value_type = 'FINITE'")


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        *itertools.product(_READ, (_cut_value, _wrong_type, _wrong_byte)),
        (("report", "one"), _wrong_state),
        (("report", "one"), _endless_number),
        (("studies", "export", "--out", "out.jsonl"), _no_end),
        (("studies", "list"), _deep_value),
        (("studies", "list"), _lost_value),
    ],
)
def test_a_damaged_database(
    fail: Fail,
    tmp_path: Path,
    stored: bytes,
    command: tuple[str, ...],
    damage: Callable[[sqlite3.Connection], None],
) -> None:
    path = tmp_path / "damaged.db"
    path.write_bytes(stored)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        damage(connection)
        connection.commit()
    content = path.read_bytes()
    code, err = fail(*command, "--storage", f"sqlite:///{path}")
    assert code == 6
    assert "was left as it is" in err
    assert path.read_bytes()[100:] == content[100:]


def test_a_task_of_an_adapter_that_is_no_text(fail: Fail, tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LOHA", "r": 4, "target_modules": ["q_proj"], "task_type": {}}')
    code, err = fail("find", "--model", "gpt2", "--gpu", "rtx-4070", "--base", str(path))
    assert code == 2
    assert path.name in err


def test_a_database_of_another_optuna(fail: Fail, tmp_path: Path, stored: bytes) -> None:
    path = tmp_path / "newer.db"
    path.write_bytes(stored)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        _wrong_optuna(connection)
        connection.commit()
    code, err = fail("report", "one", "--storage", f"sqlite:///{path}")
    assert code == 6
    assert f"It was written by a newer Optuna ({'9' * 40})" in err


@pytest.mark.usefixtures("answered")
def test_an_answer_for_a_study_that_is_damaged(fail: Fail, tmp_path: Path, stored: bytes) -> None:
    path = tmp_path / "damaged.db"
    path.write_bytes(stored)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE trials SET datetime_complete = '2026--91-22'")
        connection.commit()
    code, err = fail(*FIND, "--study", "one", "--storage", f"sqlite:///{path}")
    assert code == 6
    assert "Something in it is damaged" in err


def trials(path: Path) -> int:
    storage = f"sqlite:///{path}"
    (name,) = optuna.get_all_study_names(unpooled(storage))
    return len(optuna.load_study(study_name=name, storage=unpooled(storage)).trials)


@pytest.mark.usefixtures("answered")
def test_a_read_only_database(
    fail: Fail, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Read-only by its address: permissions do not stop root.
    path = tmp_path / "studies" / "autotune.db"
    with pytest.raises(SystemExit) as ended:
        cli.main(FIND)
    assert not ended.value.code
    assert "4,096 tokens/s" in capsys.readouterr().out
    before = trials(path)
    address = f"sqlite:///file:{path}?mode=ro&uri=true"
    code, err = fail(*FIND, "--storage", address, "--seq-len", "512")
    assert code == 6
    assert "It cannot be written to. Make it writable" in err
    assert trials(path) == before > 0


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize(
    ("storage", "part"),
    [
        ("sqlite:////proc/nowhere/x.db", "The folder of the database"),
        ("nonsense", "cannot be read"),
        ("nodriver://user:secret@host/db", "cannot be"),
        ("postgres://user:secret@host/db", "Begin it with sqlite:/// or postgresql+psycopg://"),
    ],
)
def test_a_database_that_cannot_be_opened(fail: Fail, storage: str, part: str) -> None:
    code, err = fail(*FIND, "--storage", storage)
    assert code == 6
    assert part in err
    assert "secret" not in err


def test_no_number_of_minutes_is_no_limit(fail: Fail) -> None:
    code, err = fail("nightly", "--max-minutes", "nan")
    assert code == 2
    assert "'nan' is no number of minutes" in err


@pytest.mark.parametrize("storage", ["sqlite://", "sqlite:///:memory:"])
@pytest.mark.parametrize("command", [(*FIND, "--backend", "cpu"), FIND])
@pytest.mark.usefixtures("answered")
def test_a_database_in_memory_keeps_nothing(
    fail: Fail, command: tuple[str, ...], storage: str
) -> None:
    code, err = fail(*command, "--storage", storage)
    assert code == 6
    assert "It is in memory, where nothing stays" in err


@pytest.mark.usefixtures("answered")
def test_a_corrupt_database_is_left_as_it_is(fail: Fail, tmp_path: Path) -> None:
    path = tmp_path / "broken.db"
    content = b"SQLite format 3\x00" + b"\x07" * 5000
    path.write_bytes(content)
    code, err = fail(*FIND, "--storage", f"sqlite:///{path}")
    assert code == 6
    assert "it was left as it is" in err
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "options",
    [("--out", "taken"), ("--storage", "sqlite:///taken/x.db"), ("--storage", "sqlite://")],
)
def test_where_the_answer_goes_is_checked_before_the_search(
    options: tuple[str, ...], fail: Fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.find.resolve", lambda *_, **__: pytest.fail("it searched"))
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    code, err = fail(*FIND, *options)
    assert code == 6
    assert "cannot be" in err
    assert not (tmp_path / "studies").exists()


@pytest.mark.usefixtures("answered")
def test_a_folder_that_cannot_be_written(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    code, err = fail(*FIND, "--out", "taken")
    assert code == 6
    assert "The files cannot be written to taken" in err
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "a file"


FULL_DISK = """
import resource, sys
import answers
from autotune import cli
from autotune.catalogue import gpus, models
from autotune.search import predict_best as tune
from autotune.errors import ConfigError
tune.find = lambda model, workload, space, gpu, **rest: answers.prediction(workload=workload)
gpus.detect = list
if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
cli.main(["find", "--model", "qwen2.5-1.5b", "--gpu-mem", "12GB"])
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """No file may grow beyond 2 KiB: to a program that is the same as a disk without room."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", FULL_DISK, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert run().returncode == 0
    database = tmp_path / "studies" / "autotune.db"
    folder = tmp_path / "studies" / "qwen2.5-1.5b-12gb"
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    num_trials = trials(database)

    ran = run("full")
    assert ran.returncode == 6
    assert "4,096 tokens/s" in ran.stdout
    assert "Traceback" not in ran.stderr
    assert "The files cannot be written" in ran.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before
    assert trials(database) == num_trials


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout(tmp_path: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "autotune", "models"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == 6
    check_message(ran.stderr)
    assert "The output cannot be written" in ran.stderr


@pytest.mark.parametrize("where", ["a reader that leaves", "a full disk"])
def test_output_that_cannot_be_written_costs_no_file(where: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    if is_full := where == "a full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    find = ("find", "--model", "config.json", "--gpu", "rtx-4070", "--seq-len", "64")
    with os.fdopen(writer, "w") as closed:
        ran = subprocess.run(
            [sys.executable, "-m", "autotune", *find, "--space", "quick", "--out", "out"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=closed,
            stderr=subprocess.PIPE if is_full else closed,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == (6 if is_full else 0)
    if is_full:
        assert (
            "cannot be written. No space left on device. Free some space, or read out/"
            in ran.stderr
        )
        assert ran.stderr.count("error: ") == 1
    assert trials(tmp_path / "studies" / "autotune.db") > 0
    assert (tmp_path / "out" / "train.py").exists()


def test_interrupted_while_it_is_imported(tmp_path: Path) -> None:
    """In the place of a library that is imported: Ctrl-C."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", "gpus"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Interrupted.\n")


def test_interrupted_half_way(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    database = tmp_path / "studies" / "autotune.db"
    database.parent.mkdir()
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"CREATE TABLE {PREFIX}mine (x)")
    connection.close()
    before = database.read_bytes()
    command = ("find", "--model", "config.json", "--gpu", "rtx-4070", "--seq-len", "64")
    with subprocess.Popen(
        [sys.executable, "-m", "autotune", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert "are valid" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=20) == 130
        assert process.stdout.read() == ""
    said = "Interrupted. What was stored is kept: the same command goes on from there."
    assert " ".join(rest.split()) == said
    assert database.read_bytes() == before
    # The workers' private folder is gone, and so are the workers.
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "studies"}


@pytest.mark.usefixtures("forked_workers")
def test_nothing_fits_names_the_smallest_and_the_way_out(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    text = SPACE + "    optimizer: [adamw_torch_fused]\n"
    (tmp_path / "space.yaml").write_text(text, encoding="utf-8")
    arguments = ("--model", "config.json", "--gpu-mem", "300MB", "--gpu", "rtx-4070")
    code, err = fail("find", *arguments, "--space", "space.yaml", "--method", "full")
    assert code == 4
    assert "Nothing fits into 0.28 GiB" in err
    assert "The smallest, full fine-tune, bf16-true, adamw_torch_fused, micro-batch 1 x 32" in err
    # Its weights are too few for 4 bits, or shorter samples, to help.
    assert "Name a larger card: no more than" in err
    # What was traced is kept in the user's cache; there is no answer here.
    assert not (tmp_path / "studies").exists()


@pytest.mark.usefixtures("forked_workers")
def test_no_shorter_sample_is_asked_for_where_the_load_does_not_fit(
    fail: Fail, tmp_path: Path
) -> None:
    """Transformers brings all 4-bit weights to each GPU, before FSDP2 shares them out."""
    (tmp_path / "space.yaml").write_text(
        "name: s\ndescription: ''\nmethods:\n  qlora:\n    micro_batch_size: [1]\n"
        "    precision: [bf16-autocast]\n    optimizer: [adamw_torch]\n    lora_rank: [8]\n"
        "    lora_targets: [all-linear]\n    quantization: [nf4]\n    attention: [sdpa]\n"
        "    activation_checkpointing: [full]\n    parallelism: [fsdp2]\n",
        encoding="utf-8",
    )
    code, err = fail(
        *("find", "--model", "Qwen/Qwen2.5-7B", "--gpu", "rtx-4090", "--gpu-mem", "3GB"),
        *("--num-gpus", "8", "--seq-len", "16", "--effective-batch", "8", "--space", "space.yaml"),
        *("--method", "qlora"),
    )
    assert code == 4
    assert "fsdp2 on 8 GPUs, checkpoint every layer, packed in bfloat16" in err
    assert "A smaller model lowers it most" in err
    assert "GiB are allocated as it is loaded on each GPU, before it is shared out" in err


def test_a_worker_that_talks_nonsense_is_named(
    fail: Fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    nonsense = "import sys; open(sys.argv[2], 'w').write('nonsense\\n')"
    monkeypatch.setattr(
        "autotune.worker.client.launching.worker_command", lambda: [sys.executable, "-c", nonsense]
    )
    code, err = fail("estimate", "--model", "config.json", "--gpu", "rtx-4070", "--seq-len", "61")
    assert code == 5
    assert "that is no JSON object" in err
