"""Makes up commands at random, with files and databases that are nearly right, and runs them here.

An input is a list of words for the command line and the files that they name. Most begin as something that
works: a search space, another trainer's file, a stored study; then values, keys, bytes and cells change.
Whatever comes of it must be an exit code of ours with one message, within a few seconds of CPU.

No worker process is started: of half of the inputs a trace ends as if its process had crashed, those of the
others get the trace of a small model, whatever they ask for. A search ends at once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import huggingface_hub.hf_api  # noqa: F401  trio below it starts ldconfig as it is imported
import optuna
import pytest
import yaml
from optuna.storages._rdb.storage import _VersionManager

from autotune import cli, export
from autotune.catalogue import gpus
from autotune.export.samples.values import UnusableData
from autotune.predict import tracing
from autotune.probe import fingerprint
from autotune.report import deliver, html
from autotune.search import dataset, predict_best
from autotune.store import optuna_study, upgrade
from autotune.store.database import parse_url
from autotune.worker import lengths
from autotune.worker.client import isolate
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import WorkerEnd
from tests.support import answers, ends

ROOT = Path(__file__).parents[2]
_DATABASE = "studies/autotune.db"
CODES = (0, 2, 3, 4, 5, 6)
MAX_CPU_SECONDS = 10.0
MAX_MESSAGE_CHARS = 4000
SHARE_STORED = 0.05
"""Share of the answers to changed files that go into a database and a report: 0.1 s each, against 0.01 s,
and what is stored and drawn hardly depends on the file."""

WILD_WORDS = (
    "", " ", "0", "-1", "1e400", "nan", "inf", "true", "null", "~", "-", "--", "--json", "0x10", "٣", "½",
    "é", "漢字", "\u202e", "\x1b[2J", "\udcff", "a\nb", "{}", "[1", "%s", "{0}", "$HOME", "..", ".", "/",
    "/dev/null", "/dev/null/x", "/proc/nowhere/x", "n" * 300, "n" * 1000, "9" * 20, "9" * 400,
    "12GB", "0.1GB", "1e3GB", "9" * 30 + "GB", "gpt2", "a/b", "rtx-4070", "default", "lora", "full",
    "sqlite:///x.db", "sqlite://", "sqlite:///" + "n" * 300, "sqlite:///\udcff.db", "sqlite:///file:x?mode=zz",
    "mysql://a:b@c/d", "x://", "://", "sqlite:///.", "sqlite:////dev/null", "a==b", "trl==1.0", "trl==", "==",
)  # fmt: skip
WILD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, float("nan"), float("inf"), 10**9, 10**19, 10**299,
    10**350, -(10**350), "", " ", "2", "1e400", "auto", "none", "x" * 300, "\udcff", "\x00", "\u202e", "漢字",
    [], [[]], [1], ["a"], [None], {}, {"a": 1}, {"": {}}, [{}], {1: 2}, [True, False],
)  # fmt: skip
WILD_YAML = (
    "!!timestamp x", "!!bool x", '!!int ""', "!!float x", "!!binary x", "!!python/name:os.system",
    "!!set {a}",
    "!!omap [a]", "!!pairs [a: 1]", "2024-99-99", "2024-01-01", "0b", "1:2:3", "0x" + "f" * 400, "*a",
    "&a [*a]", "&a 1", "<<", "? [1]", "? {a: 1}", "!!merge x", "!<x> y", "%YAML 9", "---\na: 1\n---\nb: 2",
    "\t", "{", "]", "|", "'", '"\\ud800"', "=", "1_0", "._", "-.inf", "0o9", "!!null x", "!!str [a]",
    "!!seq a", "!!map a",
)  # fmt: skip


@dataclass(frozen=True)
class Input:
    """A command, what lies in its folder, and what kind of input it is."""

    kind: str
    words: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    is_stored: bool = True
    """Whether an answer goes into the database and the report, too."""
    is_traced: bool = False
    """Whether a trace is there for every training step that is asked for; else its process crashes."""


@dataclass(frozen=True)
class End:
    """The end of a command: its exit code, its stderr and its time."""

    code: int
    err: str
    cpu_seconds: float

    @property
    def problem(self) -> str:
        """The fault of this end; empty where it is one that every command may have."""
        last = (self.err.splitlines() or [""])[-1]
        if "internal error" in self.err or "Traceback" in self.err:
            return self.err[-400:]
        if self.code not in CODES:
            return f"exit code {self.code}: {last[:300]}"
        if self.code and not any(
            line.lower().startswith("error: ") for line in self.err.splitlines()
        ):
            return f"exit code {self.code} without a message: {last[:300]}"
        if len(last) > MAX_MESSAGE_CHARS:
            return f"a message of {len(last)} characters: {last[:200]}"
        if self.cpu_seconds > MAX_CPU_SECONDS:
            return f"{self.cpu_seconds:.1f} s of CPU"
        return ""


_SCRIPT = """#!/bin/bash
BATCH=4
LORA=(--use_peft --lora_r 16 --lora_target_modules c_attn c_proj)
ARGS="--seed $RANDOM --gradient_accumulation_steps $((32 / BATCH))"
accelerate launch --num_processes 1 sft.py --model_name_or_path openai-community/gpt2 \\
    --per_device_train_batch_size ${BATCH} --bf16 True --max_length=512 $ARGS "${LORA[@]}" \\
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' > "log $(date).txt" 2>&1
"""


_OF_ANOTHER_PROGRAM = """output_dir: out
model_name_or_path: openai-community/gpt2
train_file: data.jsonl
per_device_train_batch_size: 2
max_seq_length: 512
lora_r: 8
lora_alpha: 16
target_modules: [c_attn]
use_4bit: true
use_flash_attn: false
bf16: true
fsdp_config: {cpu_offload: false}
evaluation_strategy: "no"
"""

_PROGRAM = """import fire
CONFIG = {"batch": 4, "lora": {"r": 8}}
class Config:
    name = "openai-community/gpt2"
    length: int = 512
config = Config()
def main(rate=1e-4, steps=CONFIG["batch"]):
    model = AutoModelForCausalLM.from_pretrained(config.name)
    lora = LoraConfig(r=CONFIG["lora"]["r"], lora_alpha=int("16"), target_modules=["c_attn"])
    args = TrainingArguments("out", per_device_train_batch_size=CONFIG.get("batch", 8), bf16=True,
        gradient_accumulation_steps=steps, learning_rate=rate if config.length == 512 else 1e-5)
    Trainer(model=get_peft_model(model, lora), args=args).train()
fire.Fire(main)
"""

_LAUNCH = """#!/bin/bash
BS=${BS:-4}
while [ $# -gt 0 ]; do case $1 in --batch) BS="$2"; shift;; esac; shift; done
CUDA_VISIBLE_DEVICES=$3 "$PYTHON" "$HERE/run.py" --model_name_or_path openai-community/gpt2 \\
    --per_device_train_batch_size $BS --use_peft_lora True --lora_r 8 --lora_target_modules c_attn \\
    --max_seq_length 512 --save_strategy no --use_flash_attn False --bf16 True
"""


class Seeds:
    """Files of every kind that is read, and a database, all of which work; made once in a folder."""

    def __init__(self, folder: Path) -> None:
        workload = answers.answer().workload
        self.bases: dict[str, str] = {"axolotl-lora.yaml": _example("axolotl-lora.yaml")}
        for config in (answers.CONFIG, answers.ADAPTER):
            for exporter in export.exporters_for(config, workload):
                result = {"evidence": "predicted"}
                with contextlib.suppress(KeyError):  # the page of a result needs more of it
                    text = exporter.write(workload=workload, config=config, result=result)
                    self.bases[f"{config.method}-{exporter.filename}"] = text
        self.bases["my-run.yaml"] = _example("my-run.yaml")
        self.bases |= {"run.sh": _SCRIPT, "launch.sh": _LAUNCH, "own.py": _PROGRAM}
        self.bases["another.yaml"] = _OF_ANOTHER_PROGRAM
        names = (".yaml", ".json", ".py", ".sh")
        self.bases = {name: text for name, text in self.bases.items() if name.endswith(names)}
        self.spaces = [path.read_text() for path in sorted((ROOT / "search_spaces").glob("*.yaml"))]
        self.night = (ROOT / "studies" / "nightly.yaml").read_text()
        self.configs = [
            path.read_text()
            for path in sorted((ROOT / "autotune/catalogue/data/models").glob("*.json"))
        ]
        self.folder = folder
        self.study = "one"
        find = ("find", "--model", "gpt2", "--gpu-mem", "12GB", "--study", self.study)
        for words in (find, (*find[:-1], "two"), (*find, "--wait")):
            assert run(Input("seed", words), folder).code == 0
        with contextlib.closing(sqlite3.connect(folder / "studies" / "autotune.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.database = (folder / "studies" / "autotune.db").read_bytes()
        self.empty_database = _empty_database(folder / "empty.db")


def _empty_database(file: Path) -> bytes:
    """Make a database with all tables and nothing in them."""
    url = f"sqlite:///{file}"
    with upgrade.open_engine(url):
        pass
    with optuna_study.opened_storage(parse_url(url)):
        pass
    return file.read_bytes()


def _example(name: str) -> str:
    return (ROOT / "examples" / name).read_text()


def draw(random: Random, seeds: Seeds) -> Input:
    """Draw one input at random."""
    made = random.choice(KINDS)(random, seeds)
    made = dataclasses.replace(made, is_traced=made.is_traced or random.random() < 0.5)
    if made.kind.startswith(("command", "database")):
        return made
    # Making the tables takes longer than most commands.
    files = {_DATABASE: seeds.empty_database, **made.files} if random.random() < 0.9 else made.files
    return dataclasses.replace(made, files=files, is_stored=random.random() < SHARE_STORED)


def _base(random: Random, seeds: Seeds) -> Input:
    name = random.choice(sorted(seeds.bases))
    text = _changed(random, seeds.bases[name])
    words = ("find", "--model", "gpt2", "--gpu", "rtx-4070", "--base", name)
    return Input(f"base {name}", words, {name: text})


def _space(random: Random, seeds: Seeds) -> Input:
    text = _changed(random, random.choice(seeds.spaces))
    words = ("find", "--model", "gpt2", "--gpu", "rtx-4070", "--space", "space.yaml")
    return Input("space", words, {"space.yaml": text})


def _peft(random: Random, _: Seeds) -> Input:
    fields: dict[str, Any] = {
        "peft_type": random.choice(("LORA", "HRA", "LOHA", "P_TUNING", "x", "lora")),
        "r": 8,
        "target_modules": ["q_proj"],
        "num_virtual_tokens": 8,
    }
    text = _changed(random, yaml.safe_dump(fields))
    command = random.choice(("find", "estimate"))
    words = (command, "--model", "gpt2", "--gpu", "rtx-4070", "--peft", "peft.yaml")
    return Input("peft", words, {"peft.yaml": text})


def _config(random: Random, seeds: Seeds) -> Input:
    text = _changed(random, random.choice(seeds.configs))
    options = (("--kv-cache",), ("--explain", "--context", "100", "--kv-cache"), ())
    words = ("estimate", "--model", "config.json", "--gpu", "rtx-4070", *random.choice(options))
    if random.random() < 0.3:
        words = ("find", "--model", "config.json", "--gpu", "rtx-4070")
    return Input("config.json", words, {"config.json": text})


def _night(random: Random, seeds: Seeds) -> Input:
    text = _changed(random, seeds.night)
    words = ("nightly", "night.yaml", "--dry-run", "--backend", "cpu")
    return Input("night", words, {"night.yaml": text})


def _dataset(random: Random, _: Seeds) -> Input:
    rows = [json.dumps({"text": "word " * random.randrange(1, 9)}) for _ in range(3)]
    text = _changed(random, random.choice(rows)) + b"\n" + "\n".join(rows).encode()
    name = random.choice(("data.jsonl", "data.txt", "data.json", "data"))
    words = ("find", "--model", "gpt2", "--gpu", "rtx-4070", "--dataset", name)
    return Input("dataset", words, {name: text})


def _lines(random: Random, seeds: Seeds) -> Input:
    """Draw an import of the lines that `studies export` wrote, one of them changed."""
    exported = seeds.folder / "exported.jsonl"
    if not exported.exists():
        run(Input("seed", ("studies", "export", "--out", "exported.jsonl")), seeds.folder)
    lines = exported.read_text().splitlines()
    number = random.randrange(len(lines))
    lines[number] = _changed(random, lines[number]).decode("utf-8", "surrogateescape")
    text = "\n".join(lines).encode("utf-8", "surrogateescape")
    return Input("lines", ("studies", "import", "lines.jsonl"), {"lines.jsonl": text})


_STORED = (
    ("studies", "list"), ("studies", "list", "--json"), ("studies", "show", "one"),
    ("studies", "show", "one", "--json"), ("studies", "compare", "one", "two"),
    ("studies", "rm", "one", "--yes"),
    ("studies", "export", "--out", "out.jsonl"), ("report", "one"), ("report", "one", "--format", "markdown"),
    ("report", "one", "--format", "json"), ("report", "one", "--format", "terminal"),
    ("export", "one", "--format", "all", "--out", "folder"),
    ("nightly", "night.yaml", "--dry-run", "--backend", "cpu"),
    ("find", "--model", "gpt2", "--gpu-mem", "12GB", "--study", "one"),
)  # fmt: skip


def _database(random: Random, seeds: Seeds) -> Input:
    content = seeds.database
    change = random.choice((_cells_changed, _cells_changed, _bytes_changed, _tables_changed))
    files = {_DATABASE: change(random, content), "night.yaml": b"models: [gpt2]\n"}
    return Input(f"database, {change.__name__[1:]}", random.choice(_STORED), files)


def _command(random: Random, seeds: Seeds) -> Input:
    """Draw a command whose options have wild values."""
    import click

    path: list[str] = []
    command: Any = cli.cli
    while isinstance(command, click.Group):
        name = random.choice(sorted(set(command.commands) - {"doctor", "completion"}))
        path.append(name)
        command = command.commands[name]
    words = [*path]
    if path[0] in ("find", "estimate", "max") and random.random() < 0.7:
        words += ["--model", "gpt2", "--gpu", "rtx-4070"]
    if path[0] == "nightly":
        words += [random.choice(("--dry-run", "--install=cron", "--install=github"))]
    options = [p for p in command.params if p.name not in ("help", "wait", "install", "dry_run")]
    for _ in range(random.randrange(1, 4) if options else 0):
        option = random.choice(options)
        if isinstance(option, click.Argument):
            words.append(_word(random, seeds))
        elif option.is_flag:
            words.append(option.opts[0])
        else:
            choices = getattr(option.type, "choices", ())
            value = random.choice(choices) if choices and random.random() < 0.5 else None
            words += [option.opts[0], str(value or _word(random, seeds))]
    if path == ["studies", "rm"]:
        words.append("--yes")
    files = {_DATABASE: seeds.database} if random.random() < 0.5 else {}
    return Input(f"command {' '.join(path)}", tuple(words), files)


def _sizes(random: Random, _: Seeds) -> Input:
    """Draw a configuration whose numbers may be as large as they are allowed to be."""
    path = ("estimate",) if random.random() < 0.7 else ("max", "--what", random.choice(_WHAT))
    words = [*path, "--model", "config.json", "--gpu", random.choice(("rtx-4070", "b200"))]
    chosen = random.sample(_SIZED, random.randrange(1, 5))
    for option in chosen:
        words += [option, str(random.choice((1, 2, 3, 10)) * 10 ** random.randrange(7))]
    for option, values in random.sample(_CHOSEN, random.randrange(4)):
        words += [option, random.choice(values)]
    return Input(f"sizes {path[0]}", tuple(words), {"config.json": _MODEL.encode()}, is_traced=True)


_WHAT = ("sequence-length", "micro-batch", "lora-rank", "gpu")
_SIZED = (
    "--seq-len",
    "--micro-batch",
    "--rank",
    "--accumulation",
    "--num-gpus",
    "--virtual-tokens",
)
_CHOSEN = (
    ("--method", ("lora", "full", "qlora", "prompt_tuning", "vera")),
    ("--optimizer", ("adamw_torch_fused", "paged_adamw_8bit", "adafactor", "sgd", "lomo")),
    ("--parallelism", ("ddp", "fsdp2", "zero2", "zero3-offload")),
    ("--precision", ("bf16-true", "fp32", "fp16-mixed")),
    ("--checkpointing", ("full", "none", "every-2")),
    ("--attention", ("eager", "sdpa")),
)
_MODEL = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32_000,
        "max_position_embeddings": 10**7,
    }
)


KINDS: tuple[Callable[[Random, Seeds], Input], ...] = (
    _base, _base, _space, _peft, _config, _night, _dataset, _lines, _database, _database, _command, _command,
    _sizes,
)  # fmt: skip


def _word(random: Random, seeds: Seeds) -> str:
    if random.random() < 0.2:
        return seeds.study
    word = random.choice(WILD_WORDS)
    if random.random() < 0.1:
        word += random.choice(WILD_WORDS)
    return word.replace("\0", "")


def _changed(random: Random, text: str) -> bytes:
    """Change a document at random: a few of its values, keys, lines or bytes."""
    content = copy.deepcopy(_parsed(text)) if random.random() < 0.7 else None
    if isinstance(content, dict):
        for _ in range(random.randrange(1, 4)):
            _change_a_value(random, content)
        if text.startswith("{") or random.random() < 0.2:
            text = json.dumps(_plain(content))
        else:
            text = yaml.dump(content, allow_unicode=True, sort_keys=False)
    if content is None or random.random() < 0.3:
        text = _changed_line(random, text)
    data = text.encode("utf-8", "surrogatepass")
    return _bytes_changed(random, data) if random.random() < 0.1 else data


@functools.lru_cache(100)
def _parsed(text: str) -> Any:
    with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
        return json.loads(text) if text.startswith("{") else yaml.safe_load(text)
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _change_a_value(random: Random, content: Any) -> None:
    """Change a value in the mapping, or in one below it."""
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not keys:
            return
        key = random.choice(keys)
        if isinstance(content[key], (dict, list)) and random.random() < 0.7:
            content = content[key]
            continue
        break
    wild = copy.deepcopy(random.choice(WILD_VALUES))
    match random.randrange(6):
        case 0 if isinstance(content, dict):
            content[random.choice(("extra", "", "r", "config", "<<", 1, None))] = wild
        case 1 if isinstance(content, dict):
            del content[key]
        case 2:
            content[key] = [content[key], wild]
        case 3:
            content[key] = {"a": content[key]}
        case _:
            content[key] = wild


def _changed_line(random: Random, text: str) -> str:
    lines = text.split("\n")
    number = random.randrange(len(lines))
    match random.randrange(5):
        case 0:
            return text[: random.randrange(len(text) + 1)]
        case 1:
            lines[number] = random.choice(WILD_YAML)
        case 2:
            lines.insert(number, random.choice(lines))
        case 3:
            lines[number] = " " + lines[number]
        case _:
            head, colon, _ = lines[number].partition(":")
            lines[number] = f"{head}{colon} {random.choice(WILD_YAML)}"
    return "\n".join(lines)


def _bytes_changed(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    if not changed:
        return b"\xff"
    for _ in range(random.choice((1, 1, 3, 30))):
        start = random.randrange(len(changed))
        match random.randrange(4):
            case 0:
                changed[start] = random.randrange(256)
            case 1:
                changed[start : start + 16] = bytes(random.randrange(256) for _ in range(16))
            case 2:
                changed[start] = 0xFF
            case _:
                del changed[start : start + random.choice((1, 100, 4096))]
        if not changed:
            break
    return bytes(changed)


def _cells_changed(random: Random, data: bytes) -> bytes:
    """Change cells of a database: values become of types that SQLite takes for any column."""

    def change(connection: sqlite3.Connection) -> None:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        tables = [name for (name,) in connection.execute(query)]
        held = [t for t in tables if connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0]]
        for _ in range(random.choice((1, 1, 2, 5))):
            table = random.choice(held)
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            column = random.choice(columns)
            rows = connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
            if not rows:
                continue
            row, value = random.choice(rows)
            wild: tuple[Any, ...] = (
                None, "", 0, -1, 2**62, 1e300, "x", "null", "[]", "{}", "5", '"x"', "NaN", b"\xff", b"",
                "\x00", '{"a": 1}', "[" * 5000, "9" * 5000, "1e999",
            )  # fmt: skip
            new = random.choice(wild)
            if isinstance(value, str) and value and random.random() < 0.6:
                cut = random.randrange(len(value))
                new = (
                    value[:cut],
                    value[:cut] + "\ufffd" + value[cut + 1 :],
                    value.replace(":", ": null, ", 1),
                    value.replace("1", "-9", 1),
                    _changed(random, value).decode("utf-8", "replace"),
                )[random.randrange(5)]
            with contextlib.suppress(sqlite3.Error):
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))

    return _with_database(data, change)


def _tables_changed(random: Random, data: bytes) -> bytes:
    """Change a database's tables, or the statements that say how they were made."""

    def change(connection: sqlite3.Connection) -> None:
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name"
        name, made = random.choice(connection.execute(query).fetchall())
        match random.randrange(4):
            case 0:
                connection.execute(f"DROP TABLE {name}")
            case 1:
                connection.execute(f"DELETE FROM {name}")
            case 2:
                column = random.choice(connection.execute(f"PRAGMA table_info({name})").fetchall())
                connection.execute(f"ALTER TABLE {name} RENAME COLUMN {column[1]} TO other")
            case _:
                connection.execute("PRAGMA writable_schema = ON")
                wrong = _bytes_changed(random, made.encode())
                statement = "UPDATE sqlite_master SET sql = CAST(? AS TEXT) WHERE name = ?"
                connection.execute(statement, (wrong, name))

    return _with_database(data, change)


def _with_database(data: bytes, change: Callable[[sqlite3.Connection], None]) -> bytes:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(data.replace(b"\x02\x02", b"\x01\x01", 1))
        with contextlib.suppress(sqlite3.Error):
            change(connection)
            connection.commit()
        return connection.serialize()


def run(made: Input, folder: Path) -> End:
    """Run the command, without what takes a process or a network; the folder is the input's alone."""
    for name, content in made.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with (
        _alone(is_stored=made.is_stored, is_traced=made.is_traced),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main(made.words)
    seconds = time.process_time() - began
    return End(int(ended.value.code or 0), err.getvalue(), seconds)


def run_apart(made: Input, folder: Path) -> End:
    """Run the command as `run` does, in a folder below that is emptied first."""
    shutil.rmtree(folder / "here", ignore_errors=True)
    (folder / "here").mkdir(parents=True)
    return run(made, folder / "here")


def _trace(method: str) -> Any:
    """The worker's answer to a small Llama: a new one, as a Trace keeps it."""
    return json.loads(_traces()["lora" if method in ("lora", "qlora", "vera", "miss") else "full"])


@functools.cache
def _traces() -> dict[str, str]:
    names = ("lora", "full")
    return {name: (ROOT / f"tests/data/tiny_llama_{name}.json").read_text() for name in names}


@functools.cache
def _newest_tables() -> str:
    """The newest version of Optuna's tables; it executes each of its revisions to say so."""
    storage = optuna.storages.RDBStorage("sqlite://")
    try:
        return storage.get_head_version()
    finally:
        storage.remove_session()
        storage.engine.dispose()  # Python 3.13 warns of a connection that nobody closes.


@contextlib.contextmanager
def _alone(*, is_stored: bool, is_traced: bool) -> Iterator[None]:
    crashed = ends.ended(how="crashed", code=1, problem="was not started")

    def counted(_verb: str, request: Mapping[str, Any], **_: Any) -> WorkerEnd:
        try:
            answer: dict[str, Any] = lengths.count_lengths(dict(request))
        except UnusableData as error:
            answer = {"problem": error.why, "remedy": error.remedy}
        answer = json.loads(json.dumps(answer))
        return ends.ended(answer)

    def ended(
        verb: str,
        requests: Sequence[Mapping[str, Any]],
        *,
        on_answer: Callable[[dict[str, Any]], None] | None = None,
        **_: Any,
    ) -> tuple[WorkerEnd, ...]:
        if verb != "trace" or not is_traced:
            return (crashed,) * len(requests)
        assert on_answer is not None
        for request in requests:
            for job in request["traces"]:
                on_answer({"id": job["id"], "trace": _trace(job["spec"]["method"])})
        return (dataclasses.replace(crashed, how="ok", exit_code=0, problem=""),) * len(requests)

    def delivered(answer: Any, *, storage: str | None, **rest: Any) -> Any:
        return deliver_all(answer, storage=storage if is_stored else None, **rest)

    class Letters:
        """A tokenizer with a token per character."""

        chat_template = eos_token_id = None
        is_fast = True

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            places = [[(n, n + 1) for n in range(len(text))] for text in texts]
            return {"input_ids": texts, "offset_mapping": places}

        def __len__(self) -> int:
            return sys.maxunicode + 1

        def get_chat_template(self) -> str:
            raise ValueError

    def too_long(*_: object) -> None:
        raise TimeoutError(f"more than {MAX_CPU_SECONDS} s of CPU")

    def found(_model: Any, workload: Any, _space: Any, gpu: Any, **_: Any) -> Any:
        return answers.prediction(workload=workload, gpu=gpu.name)

    newest_tables, deliver_all = _newest_tables(), deliver.deliver
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_VersionManager, "get_head_version", lambda _: newest_tables)
        patch.setattr(deliver, "deliver", delivered)
        patch.setattr(html, "_plotly", lambda: "")
        patch.setattr(gpus, "detect", list)
        patch.setattr(predict_best, "find", found)
        for module in (isolate, tracing):
            patch.setattr(module, "run_many", ended)
        patch.setattr(dataset, "run", counted)
        patch.setattr(lengths, "load_tokenizer", lambda _: Letters())
        # Its methods, whoever has imported the class.
        patch.setattr(ForkServer, "start", lambda *_: None)
        patch.setattr(
            ForkServer,
            "run",
            lambda _, verb, request, **rest: ended(verb, [request], **rest)[0],
        )
        patch.setattr(
            fingerprint,
            "assumed_fingerprint",
            lambda *_, **__: answers.measurement().fingerprint,
            raising=True,
        )
        patch.setattr(subprocess, "Popen", _NoProcess)
        before = signal.signal(signal.SIGVTALRM, too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * MAX_CPU_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


class _NoProcess(subprocess.Popen[bytes]):
    """A class: libraries that are imported meanwhile make subclasses of it."""

    def __init__(self, *words: Any, **_: Any) -> None:
        raise AssertionError(f"a process was to be started: {words}")
