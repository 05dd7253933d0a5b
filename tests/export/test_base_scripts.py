"""Shell scripts as a `--base`: words as bash makes them, options as programs take them, edits in place."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from autotune.errors import ConfigError
from autotune.export.base import command_line, own_run
from autotune.export.base.edit import KeyEdit, applied
from autotune.export.base.read import BaseRun, changes, read_base
from autotune.export.mapping import NotLiteral
from autotune.export.mapping_write import allows

QWEN = "Qwen/Qwen2.5-0.5B"
SCRIPT = r"""#!/bin/bash
#SBATCH --gres=gpu:1
set -e
export WANDB_PROJECT=mine  # of ours: it's a comment
MODEL="Qwen/Qwen2.5-0.5B"
BATCH=4
LORA=(
   --use_peft --lora_r 16   # the rank
   --lora_target_modules q_proj v_proj
)
MORE="--seed 3"
MORE+=" --logging_steps=10"
echo "training $MODEL"
accelerate launch --num_processes 2 src/sft.py \
    --model_name_or_path "$MODEL" \
    --per_device_train_batch_size ${BATCH} --gradient-accumulation-steps=8 \
    --bf16 True --gradient_checkpointing \
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
    --learning_rate 1e-4 --run_name it\'s "${LORA[@]}" $MORE --warmup_steps ${WARMUP:-5} 2>&1 | tee log.txt
python eval.py --tasks all
"""
OPTIONS = {
    "model_name_or_path": QWEN,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "bf16": True,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "learning_rate": 1e-4,
    "run_name": "it's",
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": ["q_proj", "v_proj"],
    "seed": 3,
    "logging_steps": 10,
    "warmup_steps": 5,
}


def test_a_script_is_the_command_that_trains_with_its_options() -> None:
    command = command_line.parsed(SCRIPT)
    assert command.program == "src/sft.py"
    assert command.launcher == ("accelerate", "launch", "--num_processes", "2")
    assert (command.num_processes, command.line) == (2, 14)
    assert command.content == OPTIONS


SCRIPTS = {
    "quotes": 'python a.py --x \'a b\'"c d"\\ e --y "\\$HOME \\"q\\"" --z=\'\'',
    "continued": "A=1 \\\n B=2 python \\\n  a.py --x \\\n --y 1 # --z 2",
    "variables": 'A=x; B="$A y"\npython a.py --x $B --y "$B" --z ${B}z --w \'$A\' --v ${C:-d} --u ${A:-d}',
    "arrays": "A=(--x 1\n  '2 3')\nA+=(--y)\npython a.py ${A[@]} \"${A[@]}\" -1",
    "one after another": "cd . && X=5\nif true; then python a.py --x $X > /dev/null; fi | cat; echo done",
    "wrapped": "nohup env A=b python a.py --x 1 2>/dev/null &\nwait",
    "put elsewhere": 'python a.py --x 1 > "log of $(echo it).txt" 2>&1 --y < /dev/null',
    "arguments": 'python a.py --x 1 "$@"',
    "put together": 'N=2\nA="\\\n  --x $N \\\n --y \'a b\' \\\n"\ncmd="python a.py $A"\necho $cmd\neval $cmd',
    "evaluated": 'A="--y 2"\neval "python a.py --x 1 $A --z"',
    "evaluated word by word": "A='--y 2'\neval python a.py --x 1 $A",
    "nothing evaluated": "eval\npython a.py --x 1",
    "exported": "export A=1 B=2\npython a.py --x $A$B",
    "no assignment": "A=7\npython a.py A=2 --x $A\nA=3",
    "arguments in a loop": "A=x\nB=\nwhile [ $# -gt 0 ]; do case $1 in --a) A=$2;; --b) B=${1#*=};; esac\n"
    "shift; done\nC=$1\npython a.py --x $A --y ${B:-d} --z ${C:-e}",
    "sums": "B=16; N=3\npython a.py --x $((B / (2 * N))) --y=$(( $B % ${N} - 1 ))z --z $((-B))",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    script, out = SCRIPTS[name], tmp_path / "words"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" >> {out}\n", "utf-8")
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
    )
    said = out.read_text("utf-8").split("\0")[:-1]
    command = command_line.parsed(script)
    words = command.words[command.launcher.index("python") + 1 :]
    assert [word.value for word in words] == said


def test_an_option_is_added_before_a_backslash_that_ends_the_script() -> None:
    text, left = command_line.edited("python a.py \\\n  --x 1 \\", [KeyEdit(key="y", value=2)])
    assert (text, left) == ("python a.py \\\n  --x 1 \\\n  --y 2 \\", [])


@pytest.mark.parametrize(
    ("launch", "number"),
    [
        ("deepspeed --include localhost:1,2,3 a.py", 3),
        ("deepspeed --include=localhost:0 --num_gpus 2 a.py", 2),
        ("export CUDA_VISIBLE_DEVICES=4,5\naccelerate launch a.py", 2),
        ("CUDA_VISIBLE_DEVICES='0,1' llamafactory-cli train", 2),
        ("CUDA_VISIBLE_DEVICES=0,1 python a.py", None),
        ("CUDA_VISIBLE_DEVICES=$1 deepspeed a.py", None),
    ],
)
def test_a_launcher_starts_a_process_for_each_card(launch: str, number: int | None) -> None:
    assert command_line.parsed(f"{launch} --x 1").num_processes == number


def test_changes_are_made_in_place() -> None:
    made = (
        KeyEdit(key="per_device_train_batch_size", value=16),
        KeyEdit(key="gradient_accumulation_steps", value=2),
        KeyEdit(key="gradient_checkpointing", value=None),
        KeyEdit(key="gradient_checkpointing_kwargs.use_reentrant", value=None),
        KeyEdit(key="bf16", value=False),
        KeyEdit(key="lora_r", value=32),
        KeyEdit(key="optim", value="adamw_bnb_8bit", after=("learning_rate",)),
        KeyEdit(key="use_peft", value=None),
        KeyEdit(key="env.PYTORCH_ALLOC_CONF", value="expandable_segments:True"),
    )
    text, left = command_line.edited(SCRIPT, made)
    # What stands in a variable among others is given once more at the end, where it counts; or stays.
    assert [change.key for change in left] == ["use_peft"]
    expected = SCRIPT.replace(
        "accelerate", "export PYTORCH_ALLOC_CONF=expandable_segments:True\naccelerate"
    )
    for old, new in (
        ("_size ${BATCH}", "_size 16"),
        ("-steps=8", "-steps=2"),
        (" --gradient_checkpointing \\\n", " \\\n"),
        ("    --gradient_checkpointing_kwargs '{\"use_reentrant\": false}' \\\n", ""),
        ("--bf16 True", "--bf16 False"),
        ("1e-4", "1e-4 \\\n    --optim adamw_bnb_8bit"),
        ("${WARMUP:-5}", "${WARMUP:-5} \\\n    --lora_r 32"),
    ):  # fmt: skip
        assert expected.count(old) == 1
        expected = expected.replace(old, new)
    assert text == expected
    assert command_line.edited(SCRIPT, ()) == (SCRIPT, [])


TEXTS = st.sampled_from(["a", "7", "it's", 'a "b"', "$HOME", "x\ty", "*", "False"])
OF_NAMES: dict[str, st.SearchStrategy[Any]] = {
    "per_device_train_batch_size": st.integers(-9, 99),
    "run_name": TEXTS,
    "bf16": st.booleans(),
    "learning_rate": st.floats(1e-9, 1e9),
    "of_its_own": st.sampled_from([["a", "b"], {"a": [1, "it's"]}, "a b", True]),
}
CHANGES = st.sampled_from([*OF_NAMES]).flatmap(
    lambda name: st.builds(KeyEdit, key=st.just(name), value=st.none() | OF_NAMES[name])
)


@hypothesis.given(st.fixed_dictionaries({}, optional=OF_NAMES), CHANGES)
def test_what_is_changed_is_read_back(said: dict[str, Any], change: KeyEdit) -> None:
    script, left = command_line.edited(
        "python a.py --seed 1", [KeyEdit(key=each, value=value) for each, value in said.items()]
    )
    assert not left
    assert command_line.parsed(script).content == {"seed": 1, **said}
    wanted: dict[str, Any] = copy.deepcopy({"seed": 1, **said})
    applied(wanted, change)
    text, left = command_line.edited(script, [change])
    assert not left
    assert command_line.parsed(text).content == wanted


@hypothesis.given(st.text("python a.y-=$(){}[]'\"\\`;|&<>#\n @x1:", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):  # Nothing else is raised.
        assert command_line.parsed(text).program


OWN = """
from dataclasses import dataclass, field
from typing import Optional
@dataclass
class Own:
    model_name_or_path: str = field(default="Qwen/Qwen2.5-0.5B")
    lora_r: Optional[int] = field(default=64, metadata={"help": "the rank"})
    lora_alpha: int = 16
    lora_target_modules: list = field(default_factory=lambda: ["q_proj", "v_proj"])
    load_in_4bit: bool = False
"""
PROGRAMS = {
    "trl.py": "a, m = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()\n"
    "SFTTrainer(model, args=a, peft_config=get_peft_config(m)).train()",
    "own.py": f"{OWN}\no, a = HfArgumentParser((Own, SFTConfig)).parse_args_into_dataclasses()\n"
    "SFTTrainer(model, args=a, peft_config=LoraConfig(r=o.lora_r)).train()",
    "trainer.py": "m, a = HfArgumentParser((M, TrainingArguments)).parse_args_into_dataclasses()\n"
    "Trainer(model=model, args=a).train()",
    "plain.py": "import argparse\n"
    "from transformers import Trainer, TrainingArguments\n"
    "p = argparse.ArgumentParser()\n"
    "p.add_argument('--bs', type=int, required=True)\n"
    "p.add_argument('--lr', type=float, default=2e-5)\n"
    "a = p.parse_args()\n"
    "args = TrainingArguments('out', per_device_train_batch_size=a.bs, learning_rate=a.lr, bf16=True)\n"
    "Trainer(model=AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-0.5B'), args=args).train()\n",
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "trl.py": (
        f"python trl.py --model_name_or_path {QWEN} --use_peft --lora_target_modules q_proj v_proj "
        "--load_in_4bit --max_length 512 --packing --per_device_train_batch_size 2 --dtype bfloat16",
        {
            "method": "qlora", "quantization": "nf4", "trainer": "trl-sft", "lora_rank": 16,
            "sequence_length": 512, "batching": "packed", "activation_checkpointing": 1,
            "precision": "bf16-autocast",
        },
    ),
    "trl sft": (
        f"trl sft --model_name_or_path {QWEN} --gradient_checkpointing False --dtype bfloat16",
        {"method": "full", "trainer": "trl-sft", "sequence_length": 1024, "micro_batch_size": 8,
         "activation_checkpointing": 0},
    ),
    "trl dpo": (
        f"trl dpo --model_name_or_path {QWEN}", {"method": "full", "trainer": "trl-dpo"},
    ),
    "own.py": (
        "python own.py --max_length 512 --load_in_4bit --per_device_train_batch_size 2",
        {"method": "qlora", "lora_rank": 64, "lora_alpha_ratio": 0.25, "lora_targets": "q_proj,v_proj",
         "trainer": "trl-sft", "sequence_length": 512},
    ),
    "trainer.py": (
        f"torchrun --nproc_per_node 1 trainer.py --model_name_or_path {QWEN} --model_max_length 2048 "
        "--bf16 True",
        {"method": "full", "precision": "bf16-autocast", "sequence_length": 2048, "trainer": "transformers"},
    ),
    "plain.py": (
        "python plain.py --bs 6",
        {"method": "full", "micro_batch_size": 6, "precision": "bf16-autocast"},
    ),
    "not here, by usual names": (
        f"deepspeed there.py --model_name_or_path {QWEN} --lora_enable True --bits 4 --lora_rank 8 --fp16 "
        "--per_device_train_batch_size 2 "
        "--lora_trainable q_proj,k_proj --double_quant --lora_alpha 32 --lora_dropout 0.1",
        {"method": "qlora", "quantization": "nf4-double", "lora_rank": 8, "lora_targets": "q_proj,k_proj",
         "lora_alpha_ratio": 4.0, "lora_dropout": 0.1, "precision": "fp16-autocast"},
    ),
    "not here, by the names of PEFT's examples": (
        f"accelerate launch there.py --model_name_or_path {QWEN} --use_peft_lora True --lora_r 8 --fp16 True "
        "--use_4bit_quantization True --use_nested_quant True --use_flash_attn True "
        "--max_seq_length 2048 --per_device_train_batch_size 2 --lora_target_modules all-linear",
        {"method": "qlora", "quantization": "nf4-double", "lora_rank": 8, "lora_targets": "all-linear",
         "attention": "flash_attention_2", "precision": "fp16-autocast", "sequence_length": 2048},
    ),
    "LLaMA-Factory": (
        f"llamafactory-cli train --stage sft --model_name_or_path {QWEN} --finetuning_type lora "
        "--lora_rank 4 "
        "--cutoff_len 256 --template qwen --per_device_train_batch_size 3 --bf16",
        {"method": "lora", "lora_rank": 4, "sequence_length": 256, "micro_batch_size": 3,
         "lora_targets": "all-linear"},
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_script(folder: Path, text: str, **asked: Any) -> BaseRun:
    (folder / "run.sh").write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    return read_base(folder / "run.sh", **asked)


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_is_read_and_written_as_its_program_takes_it(kind: str, folder: Path) -> None:
    script, expected = KINDS[kind]
    task = "dpo" if kind == "trl dpo" else None
    run = read_script(folder, script, task=task)
    assert {name: getattr(run.config, name) for name in expected} == expected
    assert run.model == QWEN
    answer = dataclasses.replace(run.config, micro_batch_size=1, optimizer="adamw_bnb_8bit")
    made = changes(run, run.config, answer)
    (part,) = run.parts
    text, _, left = part.edited(made)
    assert not left
    part.path.write_text(text, "utf-8")
    assert read_base(folder / "run.sh", task=task).config == answer
    is_program = kind == "plain.py"
    command = "python yours/plain.py --bs 6" if is_program else "bash yours/run.sh"
    assert own_run.command(run, Path(), answer) == command


@pytest.mark.parametrize("kind", ["trl.py", "trainer.py", "LLaMA-Factory"])
def test_segments_that_grow_are_those_of_the_command_s_environment(kind: str, folder: Path) -> None:
    script, _ = KINDS[kind]
    for before, expected in (("", False), ("PYTORCH_ALLOC_CONF=expandable_segments:True ", True)):
        assert read_script(folder, before + script).config.expandable_segments is expected


def test_the_task_is_that_of_the_class_that_is_loaded_or_of_an_example(folder: Path) -> None:
    script = f"python run_ner.py --model_name_or_path {QWEN} --num_train_epochs 3"
    assert read_script(folder, script).task == "token-classification"
    text = "HfArgumentParser(M)\nAutoModelForSequenceClassification.from_pretrained(a.model)\n"
    (folder / "run_ner.py").write_text(text, "utf-8")
    assert read_script(folder, script).task == "sequence-classification"
    assert read_script(folder, f"python a.py --optim sgd --model_name_or_path {QWEN}").task is None


def test_defaults_of_the_program_stand_where_the_command_says_nothing(folder: Path) -> None:
    run = read_script(folder, "python own.py --lora_r 8")
    assert (run.config.lora_rank, run.config.method) == (8, "lora")
    (part,) = run.parts
    _, _, left = part.edited([KeyEdit(key="lora_alpha", value=None)])
    assert [change.key for change in left] == ["lora_alpha"]


def test_what_the_command_leaves_out_is_in_the_file_that_it_names(folder: Path) -> None:
    file = {"model_name_or_path": QWEN, "max_length": 256, "bf16": True, "dtype": "bfloat16"}
    (folder / "recipe.yaml").write_text(json.dumps(file), "utf-8")
    run = read_script(folder, "accelerate launch trl.py --config recipe.yaml --max_length 512")
    config = run.config
    assert (run.model, config.sequence_length, config.precision) == (QWEN, 512, "bf16-autocast")
    (part,) = run.parts
    made = changes(run, config, dataclasses.replace(config, precision="bf16-true"))
    text, _, left = part.edited(made)
    assert not left
    # An option overrules the file.
    assert text.splitlines()[1].endswith("--config recipe.yaml --max_length 512 --bf16 False")


def test_options_stand_before_the_file_that_the_program_is_given(folder: Path) -> None:
    (folder / "run.yaml").write_text(f"model_name_or_path: {QWEN}\nmax_seq_length: 512\n", "utf-8")
    text = "H4ArgumentParser((ModelArguments, SFTConfig)).parse()\nSFTTrainer(model, args=args)\n"
    (folder / "handbook.py").write_text(text, "utf-8")
    run = read_script(folder, "python handbook.py run.yaml --per_device_train_batch_size=3")
    assert (run.model, run.config.sequence_length, run.config.micro_batch_size) == (QWEN, 512, 3)


def test_a_file_of_settings_that_a_program_is_given_is_named(folder: Path) -> None:
    (folder / "run.yaml").write_text("learning_rate: 1e-5\nmax_seq_length: 512\n", "utf-8")
    with pytest.raises(ConfigError, match=r"trainer.py takes its settings from run.yaml"):
        read_script(folder, "python trainer.py --config run.yaml")
    run = read_script(folder, f"python trainer.py --config run.yaml --model_name_or_path {QWEN}")
    assert (run.model, run.config.sequence_length) == (QWEN, 512)
    text = "HfArgumentParser(TrainingArguments).parse_yaml_file(sys.argv[1])\nTrainer(args=args)\n"
    (folder / "trainer.py").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"Give that file as --base"):
        read_script(folder, "python trainer.py --train_args_file run.yaml --local_rank 0")


@pytest.mark.parametrize(
    ("script", "launch"),
    [
        ("CUDA_VISIBLE_DEVICES=$1 python plain.py", "CUDA_VISIBLE_DEVICES=$1 python"),
        ("accelerate launch --num_processes $N plain.py", "accelerate launch --num_processes $N"),
        ('python "$(dirname "$0")/plain.py"', "python"),
        ('P=$(command -v python3)\n"$P" $HERE/plain.py', "$(command -v python3)"),
    ],
)
def test_a_launch_that_only_running_would_tell_is_one(
    script: str, launch: str, folder: Path
) -> None:
    run = read_script(folder, f"{script} --bs 6")
    assert (run.model, run.config.micro_batch_size) == (QWEN, 6)
    command = own_run.command(run, Path(), run.config)
    assert command == f"{launch} yours/plain.py --bs 6"


def test_a_command_is_taken_as_it_is_typed(folder: Path) -> None:
    typed = f"python trainer.py --model_name_or_path {QWEN} --bf16 True"
    run = read_base(Path(typed))
    assert (run.path, run.config.precision) == (Path("run.sh"), "bf16-autocast")
    answer = dataclasses.replace(run.config, micro_batch_size=4)
    assert own_run.command(run, Path(), answer) == "bash yours/run.sh"
    text, _, _ = run.parts[0].edited(changes(run, run.config, answer))
    assert text == f"{typed} --per_device_train_batch_size 4\n"
    notes = read_base(Path("python plain.py --bs 6")).notes
    assert not any("typed" in note for note in notes)
    with pytest.raises(ConfigError, match="no file --with an option"):
        read_base(Path("no file --with an option"))


def test_a_file_of_the_programs_own_is_no_recipe_and_a_class_that_it_does_not_parse_no_default(
    folder: Path,
) -> None:
    text = f"{PROGRAMS['own.py']}\n@dataclass\nclass Collator:\n    max_length: int = 7\n"
    (folder / "own.py").write_text(text, "utf-8")
    run = read_script(folder, "python own.py --config there.json --per_device_train_batch_size 2")
    assert (run.config.sequence_length, run.config.lora_rank) == (1024, 64)


def test_a_program_is_given_no_option_that_it_does_not_take(folder: Path) -> None:
    for script in ("python own.py --bf16 True", f"python trainer.py --model_name_or_path {QWEN}"):
        run = read_script(folder, script)
        is_own = run.config.method == "lora"
        more: dict[str, Any] = (
            {"lora_variant": "dora"} if is_own else {"precision": "bf16-autocast"}
        )
        (part,) = run.parts
        made = changes(run, run.config, dataclasses.replace(run.config, **more))
        text, _, left = part.edited(made)
        assert [change.key for change in left] == (["use_dora"] if is_own else [])
        # Neither has an option for the dtype of the weights.
        assert text.splitlines()[1] == script + ("" if is_own else " --bf16 True")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo hello", "no command in it starts a training"),
        ("python a.py --x 'y", "line 2: a quotation mark"),
        ("python a.py --x 1\npython b.py --y 1", "lines 2 and 3 each start a program"),
        (
            "python trl.py --config run.yaml --bf16",
            "--config run.yaml is no file here or beside it",
        ),
        ("python trl.py run.yaml", "takes its settings from run.yaml"),
        ("trl vllm-serve --model x", "trains nothing that is predicted"),
        ("python trainer.py --per_device_train_batch_size $1", "$1 (line 2) is not a literal"),
    ],
)
def test_what_cannot_be_read_is_said(script: str, words: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read_script(folder, script)
    assert words in str(raised.value)


_FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
}


def test_how_gpus_share_the_run_is_read_of_accelerates_file_or_said_to_be_asked(
    folder: Path,
) -> None:
    file = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "fsdp_config": _FSDP2,
    }
    (folder / "fsdp.yaml").write_text(json.dumps(file), "utf-8")
    script = "accelerate launch --config_file fsdp.yaml trainer.py --bf16 True"
    run = read_script(folder, script)
    assert run.config.parallelism == "fsdp2"
    assert "fsdp.yaml starts 2 processes: --num-gpus says how many" in run.notes
    zero = {"zero_stage": 3, "gradient_accumulation_steps": 4}
    file |= {"distributed_type": "DEEPSPEED", "deepspeed_config": zero}
    (folder / "zero.yaml").write_text(json.dumps(file), "utf-8")
    run = read_script(folder, script.replace("fsdp.yaml", "zero.yaml"))
    said = "zero.yaml: deepspeed_config.gradient_accumulation_steps: 4: training ends at once"
    assert any(note.startswith(said) for note in run.notes)
    assert read_base(folder / "zero.yaml").config.gradient_accumulation_steps == 4
    (note,) = read_script(folder, script.replace("fsdp.yaml", "there.yaml")).notes[:1]
    assert "there.yaml is no file here or beside it: --parallelism" in note
    # That is FSDP's first version.
    launched = "accelerate launch --num_processes 4 --use_fsdp trainer.py --bf16 True"
    notes = read_script(folder, launched).notes
    assert any("line 2: distributed_type: FSDP is not predicted" in note for note in notes)
    for num_gpus, said in (
        (1, ["line 2 starts 4 processes: --num-gpus says how many"]),
        (2, ["line 2 starts 4 processes, where --num-gpus is 2"]),
        (4, []),
    ):
        notes = read_script(folder, launched, num_gpus=num_gpus, samples=4).notes
        assert [note for note in notes if "starts" in note] == said


_PROGRAM = """model = AutoModelForCausalLM.from_pretrained("there/own", dtype="float32")
args = TrainingArguments(output_dir="o", gradient_accumulation_steps=4)
Trainer(model=model, args=args)
"""
_LOOP = """accelerator = Accelerator(gradient_accumulation_steps=4)
model = AutoModelForCausalLM.from_pretrained("there/own", dtype="float32")
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(data, batch_size=2)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
"""


@pytest.mark.parametrize("text", [_PROGRAM, _LOOP], ids=["Trainer", "loop"])
@pytest.mark.parametrize(
    "said",
    [
        "--config_file fsdp.yaml",
        "--use_fsdp --fsdp_version 2 --fsdp-auto-wrap-policy TRANSFORMER_BASED_WRAP --mixed_precision bf16",
        "--mixed_precision bf16",
        "--num_machines 1",
    ],
)
def test_what_accelerate_launches_a_program_with_is_read(
    said: str, text: str, folder: Path
) -> None:
    """Its precision holds where the program says none, so that no run is without one."""
    file = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2}
    (folder / "fsdp.yaml").write_text(json.dumps({**file, "fsdp_config": _FSDP2}), "utf-8")
    (folder / "own.py").write_text(text, "utf-8")
    run = read_script(folder, f"accelerate launch {said} own.py", num_gpus=2)
    is_mixed, is_shared = "machines" not in said, "fsdp" in said
    assert run.config.precision == ("bf16-mixed" if is_mixed else "fp32")
    assert run.config.parallelism == ("fsdp2" if is_shared else "none")
    # A loop can say that there is none.
    assert allows(run.target, "full", "precision", "fp32") is (text == _LOOP or not is_mixed)
    assert changes(run, run.config, run.config) == []
    if text == _LOOP:
        assert any("sync_each_batch=True" in note for note in run.notes) is is_shared
    else:
        assert run.config.no_sync is is_shared
        fewer = dataclasses.replace(run.config, micro_batch_size=4, gradient_accumulation_steps=2)
        assert {each.key for each in changes(run, run.config, fewer)} == {
            "per_device_train_batch_size", "gradient_accumulation_steps"
        }  # fmt: skip


def test_python_alone_starts_one_process_and_the_answer_one_for_each_gpu(folder: Path) -> None:
    (folder / "own.py").write_text(_PROGRAM, "utf-8")
    said = "line 2 starts one process, and the base has one for each GPU"
    for launcher, is_told in (("python -u", True), ("python -m torch.distributed.run", False)):
        run = read_script(folder, f"{launcher} own.py --x", num_gpus=2)
        assert (said in run.notes) is is_told
        command = own_run.command(run, folder, dataclasses.replace(run.config, num_gpus=2))
        several = "-m torch.distributed.run --nproc_per_node 2 " if is_told else ""
        assert command == f"{launcher} {several}{folder}/yours/own.py --x"
        assert said not in read_script(folder, f"{launcher} own.py --x").notes


def test_layers_that_are_dealt_out_are_not_where_ddp_shares_the_run(folder: Path) -> None:
    (folder / "own.py").write_text(
        _PROGRAM.replace('dtype="float32"', 'device_map="auto"'), "utf-8"
    )
    notes: list[str] = []

    def found(num_gpus: int) -> BaseRun:
        asked = {"seq_len": 64, "effective_batch": 8, "has_bf16": True, "usual_length": 64}
        path = folder / "own.py"
        return own_run.read_run(path, num_gpus=num_gpus, note=notes.append, **asked)

    run = found(1)
    assert changes(run, run.config, run.config) == []
    assert not any("deals the layers" in note for note in notes)
    run = found(2)
    assert run.config.parallelism == "ddp"
    assert any(note.startswith("own.py: model device_map deals the layers out") for note in notes)
    text, _, left = run.parts[0].edited(changes(run, run.config, run.config))
    assert text == _PROGRAM.replace(', dtype="float32"', "")
    assert left == []


def test_options_of_the_launcher_go_before_accelerates_file(folder: Path) -> None:
    file = {"distributed_type": "FSDP", "mixed_precision": "fp16", "fsdp_config": _FSDP2}
    (folder / "fsdp.yaml").write_text(json.dumps(file), "utf-8")
    (folder / "own.py").write_text(_PROGRAM, "utf-8")
    command = "accelerate launch --config_file fsdp.yaml %s own.py"

    def found(options: str) -> tuple[str, str]:
        config = read_script(folder, command % options, num_gpus=2).config
        return config.parallelism, config.precision

    assert found("") == ("fsdp2", "fp16-mixed")
    compiled = json.dumps({**file, "dynamo_config": {"dynamo_backend": "INDUCTOR"}})
    (folder / "compiled.yaml").write_text(compiled, "utf-8")
    notes = read_script(folder, "accelerate launch --config_file compiled.yaml own.py").notes
    assert any(note.startswith("compiled.yaml: dynamo_config: ") for note in notes)
    assert found("--fsdp_reshard_after_forward false") == ("fsdp2-no-reshard", "fp16-mixed")
    assert found("--fsdp_offload_params true --mixed_precision bf16") == (
        "fsdp2-offload",
        "bf16-mixed",
    )
    assert found("--multi_gpu") == ("ddp", "fp16-mixed")
    assert found("--use_deepspeed --zero_stage 3 --mixed_precision no") == ("zero3", "fp32")


def test_accelerates_own_configuration_is_read_where_a_command_names_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    (folder / "own.py").write_text(_PROGRAM, "utf-8")
    usual = folder / "home" / "accelerate" / "default_config.yaml"
    usual.parent.mkdir(parents=True)
    usual.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n")
    run = read_script(folder, "accelerate launch own.py", num_gpus=2)
    assert (run.config.parallelism, run.config.precision) == ("ddp", "bf16-mixed")
    assert f"{usual} says how accelerate launches it: --config_file names another" in run.notes
    assert read_script(folder, "torchrun own.py").config.precision == "fp32"
    (folder / "no.yaml").write_text("distributed_type: 'NO'\n")
    run = read_script(folder, "accelerate launch --config_file no.yaml own.py")
    assert run.config.precision == "fp32"
    usual.write_text("[")
    notes = read_script(folder, "accelerate launch own.py").notes
    assert any("is neither YAML nor JSON" in note for note in notes)
    usual.write_text("distributed_type: FSDP\nfsdp_config: 3\nsince: 2026-01-01\n? [1, 2]\n: 3\n")
    for options in ("", "--fsdp_version 2 --zero_stage 1"):
        notes = read_script(folder, f"accelerate launch {options} own.py").notes
        assert any("--parallelism says how GPUs share the run" in note for note in notes), notes


def test_a_programs_own_precision_goes_before_its_launchers(folder: Path) -> None:
    own = _PROGRAM.replace('"o"', '"o", fp16=True')
    (folder / "own.py").write_text(own, "utf-8")
    run = read_script(folder, "accelerate launch --mixed_precision bf16 own.py")
    assert run.config.precision == "fp16-mixed"
    notes = read_script(folder, "accelerate launch --mixed_precision fp8 own.py").notes
    assert any(note.startswith("mixed_precision: fp8 is read from our own") for note in notes)


def test_a_long_script_takes_no_time() -> None:
    for part in ("$(", "$((", '"', "'", "(", "a=", "\\", "`", "$((a)", "--x 1 ", "${", "x y "):
        started = time.process_time()
        with contextlib.suppress(ValueError):
            command_line.parsed("python a.py " + part * (30_000 // len(part)))
        assert time.process_time() - started < 1


def test_an_option_of_the_name_env_is_none_of_the_environment() -> None:
    script = "python a.py --env prod --lora_alpha " + "9" * 400
    assert command_line.parsed(script).content == {"lora_alpha": "9" * 400}
    text, left = command_line.edited(script, [KeyEdit(key="env.PYTORCH_ALLOC_CONF", value="x")])
    assert not left
    assert text == f"export PYTORCH_ALLOC_CONF=x\n{script}"


def test_options_of_a_command_that_fire_makes_are_its_parameters(folder: Path) -> None:
    text = (
        "def train(model='there', bs=4, steps: int = 2):\n"
        "  arguments = TrainingArguments(per_device_train_batch_size=bs, gradient_accumulation_steps=steps)\n"
        "  Trainer(AutoModelForCausalLM.from_pretrained(model), arguments)\n"
        "fire.Fire(train)\n"
    )
    (folder / "fired.py").write_text(text, "utf-8")
    run = read_script(folder, f"python fired.py --model {QWEN} --bs 8")
    assert (run.model, run.config.micro_batch_size) == (QWEN, 8)
    answer = dataclasses.replace(run.config, micro_batch_size=16, gradient_accumulation_steps=1)
    edited, _, left = run.parts[0].edited(changes(run, run.config, answer))
    assert left == []
    assert edited == text.replace("=bs,", "=16,").replace("= 2", "= 1")


def test_an_option_that_a_program_takes_for_the_length_is_it(folder: Path) -> None:
    text = "own, args = HfArgumentParser((Own, SFTConfig)).parse()\nargs.max_seq_length = own.block_size\n"
    (folder / "long.py").write_text(f"{text}SFTTrainer(args=args)\n", "utf-8")
    run = read_script(folder, "python long.py --block_size 4096 --learning_rate 1e-5")
    assert run.config.sequence_length == 4096
    assert "block_size" not in run.uncarried


def test_a_strategy_of_the_name_no_is_a_text(folder: Path) -> None:
    script = (
        "python trainer.py --model_name there/own --bf16 yes --save_strategy no --report_to none"
    )
    run = read_script(folder, script)
    assert json.loads(run.extra_arguments) == {"save_strategy": "no", "report_to": "none"}
    assert (run.model, run.config.precision) == ("there/own", "bf16-autocast")


def test_an_option_of_the_programs_own_is_no_argument_of_trainers(folder: Path) -> None:
    script = f"python there.py --model_name_or_path {QWEN} --optim sgd --seed 7 --debug"
    run = read_script(folder, f'{script} --output_dir "$(date +"%F %T")" --resume_from_checkpoint')
    assert json.loads(run.extra_arguments) == {"seed": 7}
    assert {"debug", "resume_from_checkpoint"} <= set(run.uncarried)


def test_what_only_running_would_tell_is_no_literal() -> None:
    content = command_line.parsed("python a.py --x $(date) --y=$1 --z `pwd`/a").content
    assert [type(value) for value in content.values()] == [NotLiteral] * 3
