"""The command line: its options are frozen, its output is what scripts and people rely on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import answers
import click
import here
import optuna
import pytest
from optuna_storage import unpooled

from autotune import cli
from autotune.catalogue.models import ModelSource
from autotune.cli.options import LENGTH, KnobType, command_line, one_of
from autotune.errors import StorageError
from autotune.export import train_config
from autotune.records.question import EFFORTS
from autotune.search import predict_best
from autotune.search.prediction import Prediction
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import METHODS
from autotune.space.knobs import KNOBS

pytestmark = pytest.mark.worker

ROOT = Path(__file__).parents[2]

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
SPACE = """
name: small
methods:
  full:
    micro_batch_size: [2, 32]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused, adamw_bnb_8bit]
    activation_checkpointing: [none, full]
"""


def all_commands(group: click.Command) -> list[click.Command]:
    subcommands = group.commands.values() if isinstance(group, click.Group) else []
    return [group, *(each for one in subcommands for each in all_commands(one))]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("find -v", "-v stands before the command: autotune -v find"),
        (
            "studies list --log-file x",
            "--log-file stands before the command: autotune --log-file studies",
        ),
        ("find --nosuch", "No such option '--nosuch'"),
    ],
)
def test_options_of_every_command_stand_before_it(main: Main, typed: str, said: str) -> None:
    ran = main(*typed.split())
    assert ran.code == 2
    assert f"error: {said}" in ran.err


def test_values_of_options_may_be_in_upper_case() -> None:
    choices = [
        (command.name, option.opts[0], option.type)
        for command in all_commands(cli.cli)
        for option in command.params
        if isinstance(option, click.Option) and isinstance(option.type, click.Choice)
    ]
    assert len(choices) > 20
    assert [each[:2] for each in choices if each[2].case_sensitive] == []
    assert one_of(METHODS).convert("LoRA", None, None) == "lora"


@pytest.mark.parametrize(("typed", "tokens"), [("8k", 8192), ("1K", 1024), ("1000", 1000)])
def test_a_length_may_end_in_k_for_1024(typed: str, tokens: int) -> None:
    assert LENGTH.convert(typed, None, None) == tokens


SHARED = {
    "--model": None,
    "--task": None,
    "--gpu": None,
    "--gpu-mem": None,
    "--num-gpus": 1,
    "--seq-len": 1024,
    "--images": None,
    "--image-size": None,
    "--audio-seconds": None,
    "--teacher": None,
    "--dataset": None,
    "--format": None,
    "--text-field": None,
    "--answer-field": None,
    "--loss-on": None,
    "--tokenizer": None,
    "--json": False,
}
FROZEN: dict[str, dict[str, Any]] = {
    "find": {
        **SHARED,
        "--odds": None,
        "--headroom": None,
        "--host-mem": None,
        "--backend": "auto",
        "--effective-batch": 32,
        "--method": None,
        "--peft": None,
        "--space": "default",
        "--allow": None,
        "--base": None,
        "--effort": "normal",
        "--confirm-steps": None,
        "--compile": None,
        "--train-steps": None,
        "--study": None,
        "--storage": "sqlite:///studies/autotune.db",
        "--out": None,
        "--wait": False,
        "--cards": None,
        "--on": None,
    },
    "estimate": {
        **SHARED,
        "--odds": None,
        "--headroom": None,
        "--host-mem": None,
        "--micro-batch": None,
        "--accumulation": 1,
        "--method": "full",
        "--base": None,
        "--rank": None,
        "--targets": None,
        "--lora-variant": None,
        "--lora-alpha-ratio": None,
        "--lora-dropout": None,
        "--kbit-preparation": None,
        "--adapter-in-base-dtype": None,
        "--chunked-loss": None,
        "--loss-mini-batches": None,
        "--precompute-ref-log-probs": None,
        "--num-generations": None,
        "--max-completion": None,
        "--kl-beta": None,
        "--num-iterations": None,
        "--steps-per-generation": None,
        "--vllm": None,
        "--vllm-sleep": None,
        "--virtual-tokens": None,
        "--peft": None,
        "--quantization": None,
        "--quant-storage": None,
        "--precision": None,
        "--optimizer": None,
        "--update-in-backward": None,
        "--checkpointing": None,
        "--checkpoint-plan": None,
        "--checkpoint-layers": None,
        "--offload": None,
        "--attention": None,
        "--batching": None,
        "--parallelism": None,
        "--no-sync": None,
        "--liger": None,
        "--trainer": None,
        "--empty-cache-steps": None,
        "--expandable-segments": None,
        "--neftune": None,
        "--compile": None,
        "--compile-backend": None,
        "--explain": False,
        "--kv-cache": False,
        "--batch": None,
        "--context": None,
    },
    "max": {
        "--dataset": None,
        "--format": None,
        "--text-field": None,
        "--answer-field": None,
        "--loss-on": None,
        "--tokenizer": None,
        "--odds": None,
        "--headroom": None,
        "--host-mem": None,
        "--num-gpus": 1,
        "--what": None,
        "--model": None,
        "--task": None,
        "--gpu": None,
        "--gpu-mem": None,
        "--seq-len": None,
        "--multiple-of": 64,
        "--micro-batch": None,
        "--accumulation": 1,
        "--method": None,
        "--rank": None,
        "--targets": None,
        "--quantization": None,
        "--quant-storage": None,
        "--precision": None,
        "--optimizer": None,
        "--update-in-backward": None,
        "--checkpointing": None,
        "--checkpoint-plan": None,
        "--checkpoint-layers": None,
        "--offload": None,
        "--attention": None,
        "--batching": None,
        "--parallelism": None,
        "--no-sync": None,
        "--lora-variant": None,
        "--lora-alpha-ratio": None,
        "--lora-dropout": None,
        "--kbit-preparation": None,
        "--adapter-in-base-dtype": None,
        "--chunked-loss": None,
        "--loss-mini-batches": None,
        "--precompute-ref-log-probs": None,
        "--num-generations": None,
        "--max-completion": None,
        "--kl-beta": None,
        "--num-iterations": None,
        "--steps-per-generation": None,
        "--vllm": None,
        "--vllm-sleep": None,
        "--virtual-tokens": None,
        "--peft": None,
        "--liger": None,
        "--trainer": None,
        "--empty-cache-steps": None,
        "--expandable-segments": None,
        "--neftune": None,
        "--compile": None,
        "--compile-backend": None,
        "--space": "default",
        "--json": False,
    },
    "report": {
        "study": None,
        "--format": "html",
        "--out": None,
        "--storage": "sqlite:///studies/autotune.db",
    },
    "export": {
        "study": None,
        "--format": None,
        "--out": None,
        "--force": False,
        "--target": None,
        "--storage": "sqlite:///studies/autotune.db",
    },
    "nightly": {
        "file": None,
        "--backend": "auto",
        "--max-minutes": None,
        "--on": None,
        "--cards": None,
        "--dry-run": False,
        "--out": None,
        "--machine": None,
        "--storage": "sqlite:///studies/autotune.db",
        "--json": False,
    },
    "cache": {"--clear": False, "--json": False},
    "gpus": {},
    "models": {},
    "spaces": {},
    "debug": {},
    "doctor": {"--storage": "sqlite:///studies/autotune.db", "--json": False},
    "calibrate": {
        "--gpu-file": None,
        "--export": None,
        "--stored": False,
        "--backend": "cuda",
        "--json": False,
    },
    "studies": {},
    "completion": {"shell": None},
}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@dataclasses.dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Main = Callable[..., Ran]


@pytest.fixture
def main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Main:
    """Run a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.catalogue.gpus.detect", list)

    def invoke(*arguments: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        return Ran(int(ended.value.code or 0), *capsys.readouterr())

    return invoke


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `tune.find` is asked; its answer is made up, for that workload."""
    calls: list[dict[str, Any]] = []

    def find(
        model: ModelSource, workload: Any, space: Any, gpu: Any, *, gpu_reason: str, **rest: Any
    ) -> Prediction:
        calls.append({"model": model, "workload": workload, "space": space, "gpu": gpu, **rest})
        return answers.prediction(workload=workload, gpu=gpu.name, gpu_reason=gpu_reason)

    monkeypatch.setattr(predict_best, "find", find)
    return calls


FIND = ("find", "--model", "qwen2.5-1.5b", "--gpu-mem", "12GB")


def test_commands_and_options_are_frozen() -> None:
    seen: dict[str, dict[str, Any]] = {}
    for name, command in cli.cli.commands.items():
        context = click.Context(command)
        seen[name] = {option.opts[0]: option.get_default(context) for option in command.params}
    assert {name: set(options) for name, options in seen.items()} == {
        name: set(options) for name, options in FROZEN.items()
    }
    for name, options in FROZEN.items():
        for option, default in options.items():
            assert (seen[name][option] or default) == (default or seen[name][option]), option
            if default is not None:
                assert seen[name][option] == default


@pytest.mark.parametrize(
    "typed",
    [
        "nightly m.yaml --backend cpu --dry-run",
        "find --model gpt2 --method lora --method qlora --out 'a b'",
    ],
)
def test_the_command_that_a_study_keeps_can_be_typed_again(typed: str) -> None:
    name, *words = shlex.split(typed)
    context = cli.cli.commands[name].make_context(name, words)
    assert command_line(context) == f"autotune {typed}"


def paths_of(command: click.Command) -> Iterator[click.Parameter]:
    """The options and arguments of a command, and of those of its group, that are paths."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from paths_of(each)
    yield from (each for each in command.params if isinstance(each.type, click.Path))


def test_every_path_knows_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave the ~ of `--out=~/answer` to the command: a folder of that name was made."""
    monkeypatch.setenv("HOME", "/home/me")
    read = {each.opts[0]: each.type.convert("~/a", None, None) for each in paths_of(cli.cli)}
    assert {"--out", "--base", "--log-file", "--export", "file"} <= set(read)
    assert set(read.values()) == {Path("/home/me/a")}


def test_what_is_neither_stdout_nor_stdin_is_no_file_called_dash(main: Main) -> None:
    for typed in (
        ("debug", "trace", "--out", "-"),
        ("calibrate", "--export", "-"),
        (*FIND, "--out", "-"),
    ):
        ran = main(*typed)
        assert (ran.code, "- is no file here. Name one." in ran.err) == (2, True), typed


def test_a_peft_config_of_a_file(main: Main, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "adapter.json"
    file.write_text('{"peft_type": "LORA", "r": 4, "base_model_name_or_path": "x", "bias": "all"}')
    assert main(*FIND, "--peft", str(file)).code == 0
    peft = '{"bias":"all","peft_type":"LORA","r":4}'
    assert asked[0]["workload"].methods == ("peft",)
    sections = {section.method: section.domains for section in asked[0]["space"].methods}
    lora, section = sections["lora"], sections["peft"]
    of_lora = {
        *("lora_rank", "lora_targets", "lora_variant", "lora_alpha_ratio", "lora_dropout"),
        "adapter_in_base_dtype",
    }
    assert section == {
        **{name: domain for name, domain in lora.items() if name not in of_lora},
        "peft": (peft,),
    }
    # Another file is another study.
    assert main(*FIND, "--peft", str(file), "--method", "lora").code == 0
    assert asked[1]["workload"].methods == ("lora", "peft")
    names = {path.name for path in (tmp_path / "studies").iterdir() if path.is_dir()}
    assert any(name.startswith("qwen2.5-1.5b-12gb-peft-") for name in names)


def test_the_order_of_methods_says_nothing(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The base is the defaults' training by the first: qlora would be called exact, full a recipe."""
    assert main(*FIND, "--method", "qlora", "--method", "full", "--method", "qlora").code == 0
    assert main(*FIND, "--method", "full", "--method", "qlora").code == 0
    assert [each["workload"].methods for each in asked] == [("full", "qlora")] * 2
    # The same question has one study, which takes both.
    assert len([path for path in (tmp_path / "studies").iterdir() if path.is_dir()]) == 1


def test_targets_of_a_base_have_a_study_that_holds_them(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    for number, targets in enumerate(("q_proj", "q_proj,v_proj")):
        base = tmp_path / f"{number}.yaml"
        names = "".join(f"  - {name}\n" for name in targets.split(","))
        base.write_text(
            "base_model: Qwen/Qwen2.5-1.5B\nadapter: lora\nlora_r: 8\nlora_alpha: 16\n"
            f"lora_target_modules:\n{names}sequence_len: 1024\nmicro_batch_size: 1\n"
            "gradient_accumulation_steps: 32\nbf16: true\noptimizer: adamw_torch\n"
        )
        assert main(*FIND, "--base", str(base)).code == 0
    assert main(*FIND).code == 0
    assert len(asked) == 3
    names = {path.name for path in (tmp_path / "studies").iterdir() if path.is_dir()}
    assert len(names) == 3
    assert "qwen2.5-1.5b-12gb" in names


def test_the_efforts_are_those_of_the_search() -> None:
    assert tuple(predict_best.EFFORTS) == EFFORTS


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_quick_and_names_every_command(tmp_path: Path) -> None:
    seconds = []
    for _ in range(4):
        started = cpu_seconds_of_children()
        helped = run("--help", cwd=tmp_path)
        seconds.append(cpu_seconds_of_children() - started)
    assert helped.returncode == 0
    assert all(f"  {name} " in helped.stdout for name in FROZEN)
    assert "AUTOTUNE_DEBUG" in helped.stdout
    assert min(seconds) < 0.5  # 0.15 s on a quick core


@pytest.mark.parametrize("typed", [(), ("studies",), ("debug",)])
def test_a_group_by_its_name_alone_shows_its_commands(main: Main, typed: tuple[str, ...]) -> None:
    ran = main(*typed)
    assert (ran.code, ran.err) == (2, main(*typed, "--help").out)


def test_version(main: Main) -> None:
    assert main("--version").out.startswith("autotune, version ")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    (folder / "small.yaml").write_text(SPACE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def searched(tiny: Path) -> subprocess.CompletedProcess[str]:
    """A whole search, traces and all."""
    arguments = ("--model", "model", "--gpu", "rtx-4070", "--gpu-mem", "2GB", "--seq-len", "256")
    return run("find", *arguments, "--space", "small.yaml", "--json", cwd=tiny)


def test_find_prints_one_json_object(
    searched: subprocess.CompletedProcess[str], tiny: Path
) -> None:
    assert searched.returncode == 0, searched.stderr
    assert searched.stderr == ""
    result = json.loads(searched.stdout)
    assert set(result) >= {
        "schema_version",
        "evidence",
        "workload",
        "gpu",
        "memory_budget_bytes",
        "best",
        "baseline",
        "speedup",
        "best_by_class",
        "tied",
        "counts",
        "elapsed_seconds",
        "versions",
        "files",
    }
    assert result["evidence"] == "predicted"
    assert result["memory_budget_bytes"] == 2_000_000_000
    assert result["counts"]["enumerated"] == 8
    assert result["best"]["fits"] is True
    assert result["best"]["peak_device_bytes"] <= 2_000_000_000
    # The base is a point of the space, so the answer cannot be slower.
    assert result["speedup"] >= 0.98
    paths = [Path(path) for path in result["files"]]
    names = {path.name for path in paths if path.parent.name != "exports"}
    assert names == {"train.py", "training_args.json", "train_config.yaml", "result.json"}
    for path in result["files"]:
        assert (tiny / path).is_file()
    stored = json.loads((tiny / Path(result["files"][0]).with_name("result.json")).read_text())
    assert stored == result


def test_find_leaves_a_study_that_optuna_opens(
    searched: subprocess.CompletedProcess[str], tiny: Path
) -> None:
    storage = f"sqlite:///{tiny}/studies/autotune.db"
    (name,) = optuna.get_all_study_names(unpooled(storage))
    assert name == "model-2gb-seq256-nvidia-rtx-4070"
    study = optuna.load_study(study_name=name, storage=unpooled(storage))
    best = json.loads(searched.stdout)["best"]
    assert study.best_value == pytest.approx(best["tokens_per_second"], rel=0.02)
    assert study.user_attrs["command"].startswith("autotune find --model model --gpu rtx-4070")
    assert {"torch", "transformers"} <= set(study.user_attrs["versions"])


def test_find_leaves_a_report_and_report_draws_it_again(
    searched: subprocess.CompletedProcess[str], tiny: Path
) -> None:
    folder = (tiny / json.loads(searched.stdout)["files"][0]).parent
    beside = (folder / "report.html").read_text(encoding="utf-8")
    drawn = here.command("report", folder.name, "--out", "again.html", cwd=tiny)
    assert drawn.returncode == 0, drawn.stderr
    assert (tiny / "again.html").read_text(encoding="utf-8") == beside
    assert here.command("report", folder.name, "--out", "-", cwd=tiny).stdout == beside
    told = here.command("report", folder.name, "--format", "json", cwd=tiny)
    record = json.loads(told.stdout)
    # The way from the base to the answer ends at the answer.
    best = json.loads(searched.stdout)["best"]
    path = record["details"]["path"]
    assert not path or path[-1]["tokens_per_second"] == best["tokens_per_second"]
    assert max(record["details"]["answer"]["bytes_by_category"]["parameter"]) > 0
    assert len(record["trials"]) == json.loads(searched.stdout)["counts"]["replayed"]


@pytest.mark.usefixtures("forked_workers")
def test_estimate_prices_the_answer_alike(
    searched: subprocess.CompletedProcess[str], tiny: Path
) -> None:
    best = json.loads(searched.stdout)["best"]
    config = best["config"]
    interval = config["activation_checkpointing"]
    ran = here.command(
        *("estimate", "--model", "model/config.json", "--gpu", "RTX 4070", "--gpu-mem", "2GB"),
        *("--seq-len", "256", "--micro-batch", str(config["micro_batch_size"])),
        *("--accumulation", str(config["gradient_accumulation_steps"])),
        *("--optimizer", config["optimizer"], "--precision", config["precision"]),
        *("--checkpointing", "full" if interval else "none", "--json", "--explain"),
        *("--headroom", "1.99GB"),
        cwd=tiny,
    )
    assert ran.returncode == 0, ran.stderr
    assert "of the room that --headroom 1.99GB asks for are lacking" in ran.stderr
    result = json.loads(ran.stdout)
    explanation = {line["name"]: line for line in result.pop("explanation")}
    taught = {row["optimizer"]: row for row in result.pop("textbook")["optimizers"]}
    assert taught[config["optimizer"]]["peak_device_bytes"] == best["peak_device_bytes"]
    assert explanation["total"]["peak_bytes"] == best["peak_device_bytes"]
    assert {name: result[name] for name in best if name != "class"} == {
        name: value for name, value in best.items() if name != "class"
    }
    assert result["schema_version"] == 1
    assert result["evidence"] == "predicted"
    # Weights in 16 bits, and a few rotary frequencies.
    weights_bytes = 2 * result["parameters"]["total"]
    assert 0 <= result["state"]["parameters_bytes"] - weights_bytes < 1024
    assert sum(result["breakdown"].values()) == result["peak_allocated_bytes"]


@pytest.mark.usefixtures("forked_workers")
def test_estimate_takes_a_precision_that_the_parallelism_has(tiny: Path) -> None:
    ran = here.command(
        *("estimate", "--model", "model/config.json", "--gpu", "a100", "--seq-len", "64"),
        *("--num-gpus", "4", "--parallelism", "zero3", "--json"),
        cwd=tiny,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["config"]["precision"] == "bf16-mixed"


def test_the_answer_goes_to_stdout_and_the_files_to_out(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    ran = main(*FIND, "--out", "here")
    assert ran.code == 0
    assert "PREDICTED, not measured" in ran.out
    assert "python here/train.py --dataset FILE.jsonl" in ran.out
    assert {path.name for path in (tmp_path / "here").iterdir()} >= {"train.py", "result.json"}
    result = json.loads((tmp_path / "here" / "result.json").read_text(encoding="utf-8"))
    assert result["files"][0].startswith("here")
    assert asked[0]["workload"].model == "Qwen/Qwen2.5-1.5B"
    assert asked[0]["gpu"].name == "NVIDIA RTX 4070"


def test_defaults_of_find(main: Main, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert main(*FIND).code == 0
    call = asked[0]
    assert call["workload"].sequence_length == 1024
    assert call["workload"].effective_batch_size == 32
    assert call["workload"].methods == METHODS
    assert call["workload"].task == "causal-lm"
    assert (call["allow"], call["base"], call["effort"]) == (None, None, "normal")
    assert call["space"].name == "default"
    # A planned card is not part of the name, a named one is.
    assert (tmp_path / "studies" / "qwen2.5-1.5b-12gb" / "train.py").is_file()
    assert main(*FIND, "--gpu", "rtx-4090").code == 0
    assert (tmp_path / "studies" / "qwen2.5-1.5b-12gb-nvidia-rtx-4090" / "train.py").is_file()


def test_options_reach_the_search(main: Main, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    arguments = ("--method", "qlora", "--method", "lora", "--method", "qlora", "--allow", "exact")
    more = ("--effort", "quick", "--space", "lora", "--seq-len", "512", "--effective-batch", "8")
    assert main(*FIND, *arguments, *more, "--study", "../my study").code == 0
    call = asked[0]
    assert call["workload"].methods == ("lora", "qlora")
    assert (call["allow"], call["effort"], call["space"].name) == ("exact", "quick", "lora")
    assert call["workload"].sequence_length == 512
    assert call["workload"].effective_batch_size == 8
    # A study may have any name; its folder stays where it belongs.
    assert (tmp_path / "studies" / "my-study" / "train.py").is_file()


def test_what_a_prediction_cannot_confirm_is_said(main: Main, asked: list[dict[str, Any]]) -> None:
    ran = main(*FIND, "--confirm-steps", "5")
    assert ran.code == 0
    assert "note: --confirm-steps" in ran.err
    assert main(*FIND).err == ""


def test_an_encoder_takes_as_many_tokens_as_it_has_positions(
    main: Main, asked: list[dict[str, Any]]
) -> None:
    ran = main("find", "--model", "bert-base-uncased", "--gpu-mem", "12GB")
    assert ran.code == 0
    assert "note: bert-base-uncased has positions for 512 tokens" in ran.err
    assert asked[0]["workload"].sequence_length == 512
    assert asked[0]["workload"].task == "masked-lm"
    task = ("--task", "sequence-classification", "--seq-len", "128")
    assert main("find", "--model", "bert-base-uncased", "--gpu-mem", "12GB", *task).err == ""
    assert asked[1]["workload"].task == "sequence-classification"


def base_file(folder: Path, **changed: Any) -> Path:
    config = dataclasses.replace(answers.BASE, gradient_accumulation_steps=16, **changed)
    path = folder / "base.yaml"
    text = train_config.write(
        workload=answers.WORKLOAD, config=config, result={"evidence": "predicted"}
    )
    path.write_text(text, encoding="utf-8")
    return path


def test_a_base_lends_what_was_not_typed(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = base_file(tmp_path, sequence_length=2048)
    assert main(*FIND, "--base", str(path)).code == 0
    assert asked[0]["base"].sequence_length == 2048
    assert asked[0]["workload"].sequence_length == 2048
    assert asked[0]["workload"].effective_batch_size == 16
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("task: causal-lm", "task: sequence-classification"), encoding="utf-8"
    )
    assert main("find", "--gpu-mem", "12GB", "--base", str(path)).code == 0
    assert asked[1]["workload"].model == answers.WORKLOAD.model
    assert asked[1]["workload"].task == "sequence-classification"


def test_what_the_base_sets_beside_goes_through(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = base_file(tmp_path)
    content = path.read_text(encoding="utf-8")
    path.write_text(f"{content}extra_arguments:\n  learning_rate: 2e-4\n", encoding="utf-8")
    ran = main(*FIND, "--base", str(path), "--out", "out")
    assert ran.code == 0
    assert asked[0]["workload"].extra == {"learning_rate": 0.0002}
    path.write_text(f"{content}extra_arguments:\n  optim: sgd\n", encoding="utf-8")
    ran = main(*FIND, "--base", str(path), "--out", "out")
    assert ran.code == 2
    assert "extra_arguments.optim is decided by config.optimizer" in " ".join(ran.err.split())


def test_another_trainers_file_comes_back_with_the_answer(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    text = (
        "base_model: Qwen/Qwen2.5-1.5B  # ours\nlearning_rate: 2e-4\nsequence_len: 1024\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 16\n"
    )
    path.write_text(text, encoding="utf-8")
    ran = main("find", "--base", str(path), "--gpu-mem", "12GB", "--out", "out")
    assert ran.code == 0, ran.err
    assert asked[0]["workload"].model == "Qwen/Qwen2.5-1.5B"
    assert asked[0]["workload"].extra == {"learning_rate": 2e-4}
    assert asked[0]["base"].method == "full"
    assert asked[0]["has"] == asked[0]["base"]
    assert {section.method for section in asked[0]["space"].methods} == {"full", "lora", "qlora"}
    assert path.read_text(encoding="utf-8") == text
    # The made-up answer: micro-batch 4 x 8, where the base of it has 1 x 8.
    written = (tmp_path / "out" / "yours" / "mine.yaml").read_text(encoding="utf-8")
    assert "micro_batch_size: 4\n" in written
    assert written.startswith("base_model: Qwen/Qwen2.5-1.5B  # ours\n")
    assert "note: your mine.yaml is written" in " ".join(ran.err.split())


def test_a_program_comes_back_with_the_answer(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    text = (
        "from transformers import AutoModelForCausalLM, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-1.5B')  # ours\n"
        "arguments = TrainingArguments(\n"
        "    per_device_train_batch_size=2,  # of 24 GB\n"
        "    gradient_accumulation_steps=16,\n"
        "    learning_rate=args.lr,\n"
        ")\n"
    )
    path.write_text(text, encoding="utf-8")
    ran = main("find", "--base", str(path), "--gpu-mem", "12GB", "--out", "out")
    assert ran.code == 0, ran.err
    assert asked[0]["workload"].model == "Qwen/Qwen2.5-1.5B"
    assert {section.method for section in asked[0]["space"].methods} == {"full"}
    assert path.read_text(encoding="utf-8") == text
    written = (tmp_path / "out" / "yours" / "mine.py").read_text(encoding="utf-8")
    assert "    per_device_train_batch_size=4,  # of 24 GB\n" in written
    assert "    learning_rate=args.lr,\n" in written
    said = " ".join(ran.err.split())
    assert "note: your mine.py is written" in said
    assert "next python out/yours/mine.py" in " ".join(ran.out.split())
    assert "not literal values, so not in the other files: learning_rate: args.lr (line 6)" in said


def test_what_a_part_leaves_open_is_taken_and_said(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(
        '{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],'
        ' "base_model_name_or_path": "Qwen/Qwen2.5-1.5B"}'
    )
    ran = main(
        "find", "--base", str(path), "--gpu-mem", "12GB", "--effective-batch", "64", "--out", "out"
    )
    assert ran.code == 0, ran.err
    base = asked[0]["base"]
    assert (base.lora_rank, base.lora_targets, base.effective_batch_size) == (8, "q_proj", 64)
    assert "does not say how it trains: micro_batch_size: 1" in " ".join(ran.err.split())
    assert (tmp_path / "out" / "yours" / "adapter_config.json").exists()


def test_a_model_is_needed_where_no_file_names_one(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    for typed in (("find", "--gpu-mem", "12GB"), ("find",), ("estimate",)):
        assert "There is no model" in main(*typed).err
    path = base_file(tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(f"  model: {answers.WORKLOAD.model}\n", ""), encoding="utf-8")
    ran = main("find", "--gpu-mem", "12GB", "--base", str(path))
    assert ran.code == 2
    assert "base.yaml names none. Give --model" in ran.err
    assert asked == []


def test_a_base_for_other_work_is_refused(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    ran = main(*FIND, "--base", str(base_file(tmp_path)), "--effective-batch", "32")
    assert ran.code == 2
    assert "--effective-batch is 32, and the base has 16" in ran.err
    ran = main(*FIND, "--base", str(base_file(tmp_path, quantization="nf4")))
    assert ran.code == 2
    assert "quantization-needs-qlora" in ran.err
    assert asked == []


def test_the_study_does_not_keep_the_address_of_its_database(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path}/other.db"
    ran = main(*FIND, "--method", "lora", "--storage", storage)
    assert ran.code == 0
    (study,) = optuna.get_all_study_summaries(unpooled(storage))
    assert study.user_attrs["command"] == (
        "autotune find --model qwen2.5-1.5b --gpu-mem 12GB --method lora"
    )


def test_what_cannot_be_stored_does_not_cost_the_answer(
    main: Main, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise StorageError("The files cannot be written", why="No space")

    monkeypatch.setattr("autotune.export.export_files", refuse)
    ran = main(*FIND)
    assert ran.code == 6
    assert "4,096 tokens/s" in ran.out
    assert "next" not in ran.out
    assert ran.err.splitlines()[-1] == "error: The files cannot be written. No space."
    monkeypatch.setattr("autotune.store.optuna_study.open_study", refuse)
    ran = main(*FIND, "--json")
    assert ran.code == 6
    assert json.loads(ran.out)["files"] == []
    assert ran.err.count("error: ") == 2


def test_a_study_of_another_workload_is_left_alone(main: Main, asked: list[dict[str, Any]]) -> None:
    assert main(*FIND, "--study", "mine").code == 0
    ran = main(*FIND, "--study", "mine", "--seq-len", "2048", "--out", "elsewhere")
    assert ran.code == 2
    assert "sequence_length was 1024, now 2048" in ran.err
    theirs = optuna.create_study(
        storage=unpooled("sqlite:///studies/autotune.db"), study_name="theirs"
    )
    theirs.add_trial(optuna.trial.create_trial(value=1.0))
    ran = main(*FIND, "--study", "theirs")
    assert (ran.code, "was not made by autotune" in ran.err) == (2, True)
    assert len(asked) == 1  # No other search was begun.


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no database " * 1000, "The file is damaged or is not SQLite's"),
        ("CREATE TABLE songs (title)", "It belongs to another program"),
    ],
)
def test_a_database_that_cannot_be_used_is_refused_before_the_search(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path, content: bytes | str, why: str
) -> None:
    path = tmp_path / "taken.db"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(content)
    ran = main(*FIND, "--storage", f"sqlite:///{path}")
    assert (ran.code, asked) == (6, [])
    assert f"taken.db cannot be used. {why}" in ran.err


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300])
def test_a_name_that_no_study_can_have_is_refused_before_the_search(
    main: Main, asked: list[dict[str, Any]], tmp_path: Path, name: str
) -> None:
    ran = main(*FIND, "--study", name)
    assert (ran.code, ran.out, asked) == (2, "", [])
    assert "cannot name a study" in ran.err
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("gpus", ("Here: no CUDA GPU", "\nrtx-4070 ", "11.5", "504", "8.9")),
        ("models", ("Qwen/Qwen2.5-1.5B", "1.54 B", "causal-lm", "masked-lm")),
        ("spaces", ("default", "57,", "full, LoRA and QLoRA")),
    ],
)
def test_lists(main: Main, command: str, parts: tuple[str, ...]) -> None:
    ran = main(command)
    assert (ran.code, ran.err) == (0, "")
    for part in parts:
        assert part in ran.out


@pytest.mark.parametrize("value", ["full", "none", "every-3", "solve"])
def test_checkpointing_in_words(value: str) -> None:
    kind = KnobType(KNOBS["activation_checkpointing"])
    assert (
        kind.convert(value, None, None)
        == ({"full": 1, "none": 0, "every-3": 3, "solve": SOLVE}[value])
    )


def test_a_mistake_of_ours_is_one_line_and_a_traceback_on_request(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("boom\nand more")

    monkeypatch.setattr(predict_best, "find", fail)
    ran = main(*FIND)
    assert ran.code == 1
    assert ran.err.startswith("internal error: RuntimeError: boom and more. Please report")
    assert len(ran.err.splitlines()) == 1
    monkeypatch.setenv("AUTOTUNE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="boom"):
        cli.main(FIND)


def nobody_listened(*_: object) -> None:
    pytest.fail("the process would have ended at once, and left its folders behind")


@pytest.mark.parametrize(
    ("number", "before", "code"),
    [
        (signal.SIGTERM, nobody_listened, 130),
        (signal.SIGHUP, nobody_listened, 130),
        # nohup
        (signal.SIGHUP, signal.SIG_IGN, StorageError.exit_code),
    ],
)
def test_a_stop_is_a_ctrl_c(
    main: Main, monkeypatch: pytest.MonkeyPatch, number: int, before: Any, code: int
) -> None:
    def stop(*arguments: Any, **named: Any) -> None:
        os.kill(os.getpid(), number)
        raise StorageError("It went on")

    monkeypatch.setattr(predict_best, "find", stop)
    outside = signal.signal(number, before)
    try:
        ran = main(*FIND)
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, outside)
    assert ran.code == code, ran.err
    assert ("Interrupted. What was stored is kept" in ran.err) == (code == 130)


def test_streams_that_are_closed_are_no_problem(tmp_path: Path) -> None:
    """Else what is opened next has their numbers, and gets what is printed."""
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    words = ["find", "--model", "./config.json", "--gpu", "rtx-4090", "--method", "full"]
    words += ["--space", "quick", "--seq-len", "64"]
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "autotune", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0
    assert len(list(tmp_path.glob("studies/*/report.html"))) == 1


def test_a_reader_that_leaves_is_no_problem(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        ran = subprocess.run(
            [sys.executable, "-m", "autotune", "models"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
    assert ran.stderr == ""
