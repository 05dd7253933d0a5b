"""A shell script that starts a training, read as the settings that its options give.

The command is `accelerate launch train.py --per_device_train_batch_size 4`, or one of torchrun, deepspeed,
python, `trl sft` and `llamafactory-cli train`. Its words are those of a shell (shell_words). A value that
only running would tell is no literal.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.common import user_text
from autotune.export.base.edit import KeyEdit, applied
from autotune.export.base.shell_words import ASSIGNED, UNKNOWN, Word, commands
from autotune.export.mapping import NotLiteral
from autotune.export.training_args import OLDER_NAMES, installed_fields
from autotune.memory.alloc_conf import VARIABLES

_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")

_GAP_BEFORE = re.compile(r"(?:[ \t]|\\\r?\n)+\Z")
_TEXT = re.compile(r"(?!.*\b(bool|dict|float|int)\b).*\bstr\b.*")
"""The annotation of a field that takes a text: `no` of a strategy is no False."""
_LAUNCHERS = ("accelerate", "deepspeed", "torchrun")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_TOOLS = ("trl", "llamafactory-cli")
_WRAPPERS = (
    "conda", "do", "else", "env", "eval", "exec", "nice", "nohup", "poetry", "run", "srun", "stdbuf",
    "sudo", "then", "time", "uv",
)  # fmt: skip
_OF_TRAINING = {
    "gradient_accumulation_steps", "learning_rate", "max_steps", "num_train_epochs", "optim",
    "per_device_train_batch_size",
}  # fmt: skip
"""Options by which a command that trains is told from others, of an evaluation say."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ONE_EACH = {"accelerate", "deepspeed", "llamafactory-cli"}
"""Programs that start a process for each card, where no number is said."""
_CARDS = re.compile(r"(localhost:)?(?P<cards>\d+(,\d+)*)")
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    words: tuple[Word, ...]
    """Its own word, and those of its values."""
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The command of a script that trains."""

    launcher: tuple[str, ...]
    """Words before the program."""
    program: str
    """Path of a Python program, name of a module, or a tool and its command: `trl sft`."""
    line: int
    launched: Mapping[str, Any]
    """Values of the launcher's own options."""
    content: Mapping[str, Any]
    """Values by option, a later one instead of an earlier; `env` has those of the environment that count, and
    stands for no option."""
    positional: tuple[str, ...]
    """Words that belong to no option."""
    words: tuple[Word, ...] = field(repr=False, default=())
    options: tuple[_Option, ...] = field(repr=False, default=())
    variables: Mapping[str, Word] = field(repr=False, default_factory=dict)
    """Assignments of `env`."""

    @property
    def num_processes(self) -> int | None:
        """Processes that the launcher starts on this machine, where it says so in a number."""
        said = [self.launched.get(name) for name in _PROCESSES]
        # Where no number is said, one for each card.
        if (
            self.launcher
            and self.tool != "trl"
            and not _ONE_EACH.isdisjoint((*self.launcher, self.tool))
        ):
            cards = (self.launched.get(name) for name in ("include", _VISIBLE))
            found = (_CARDS.fullmatch(str(each)) for each in cards)
            said += [each["cards"].count(",") + 1 for each in found if each is not None]
        return next((number for number in said if type(number) is int), None)

    @property
    def tool(self) -> str:
        """The tool of which the program is a command; empty for a Python program."""
        tool = self.program.partition(" ")[0]
        return tool if tool in _TOOLS else ""

    @property
    def before(self) -> str:
        """The words before the program, as a shell takes them."""
        return _as_typed(self.words[: len(self.launcher)])

    @property
    def rest(self) -> str:
        """The words after the program, as a shell takes them."""
        return _as_typed(self.words[len(self.launcher) + 1 :])


def says_how_it_trains(content: Mapping[str, Any]) -> bool:
    """Return whether one of some options is of a training."""
    return not _OF_TRAINING.isdisjoint(content)


def _as_typed(words: Sequence[Word]) -> str:
    return " ".join(word.shown if word.value is None else shlex.quote(word.value) for word in words)


def is_script(path: Path, text: str) -> bool:
    """Return whether a file is a shell script."""
    first = text.partition("\n")[0]
    return path.suffix in _SUFFIXES or re.match(r"#!.*\b(ba|z|da)?sh\b", first) is not None


def parsed(text: str) -> Command:
    """Return the command that trains. Raises ValueError where there is none, or several."""
    environment: dict[str, Word] = {}
    found = [
        command
        for words in commands(text, environment)
        if (command := _training(words)) is not None
    ]
    if not found:
        raise ValueError(
            "no command in it starts a training: python, accelerate launch, torchrun, deepspeed, trl or "
            "llamafactory-cli with a program"
        )
    trains = [command for command in found if says_how_it_trains(command.content)]
    given = trains or [command for command in found if command.options] or found
    if len(given) > 1:
        lines = " and ".join(str(command.line) for command in given)
        raise ValueError(f"lines {lines} each start a program: keep one")
    command = given[0]
    env = {name: word.value for name in VARIABLES if (word := environment.get(name)) and word.value}
    content = {name: value for name, value in command.content.items() if name != "env"}
    content |= {"env": env} if env else {}
    visible = environment.get(_VISIBLE)
    launched = {**command.launched, **({} if visible is None else {_VISIBLE: visible.value})}
    return dataclasses.replace(command, content=content, variables=environment, launched=launched)


def edited(text: str, changes: Sequence[KeyEdit]) -> tuple[str, list[KeyEdit]]:
    """Return the text with the changes, and those that could not be made."""
    left: list[KeyEdit] = []
    for change in changes:
        command = parsed(text)
        wanted = copy.deepcopy(dict(command.content))
        applied(wanted, change)
        new = text
        for name in dict.fromkeys([*command.content, *wanted]):
            if command.content.get(name) != wanted.get(name):
                new = _with(new, parsed(new), name, wanted.get(name), change.after)
        if parsed(new).content == wanted:
            text = new
        else:
            left.append(change)
    return text, left


def _training(words: Sequence[Word]) -> Command | None:
    """Return the command where it starts a training; None for any other.

    A word that only running would tell may be Python, or the folder of the program.
    """
    values = [word.shown for word in words]
    at = 0
    while at < len(values) and (
        values[at] in _WRAPPERS or values[at].startswith("-") or ASSIGNED.fullmatch(values[at])
    ):
        at += 1
    is_open = at < len(words) and words[at].value is None
    tool = Path(values[at]).name if at < len(values) else ""
    program: int | None = None
    if tool in _TOOLS and at + 1 < len(values):
        program = at + 1
    elif is_open or tool in _LAUNCHERS or tool.startswith("python") or tool.endswith(".py"):
        program = _program_at(values, at)
    if program is None:
        return None
    options, positional = _options(words[program + 1 :])
    said, _ = _options(words[at:program])
    return Command(
        launcher=tuple(values[:program]),
        program=f"{tool} {values[program]}" if tool in _TOOLS else values[program],
        line=words[0].line,
        launched={option.name: option.value for option in said},
        content={option.name: option.value for option in options},
        positional=positional,
        words=tuple(words),
        options=tuple(options),
    )


def _program_at(values: Sequence[str], first: int) -> int | None:
    """Return the place of the program behind a launcher."""
    for at in range(first, len(values)):
        if values[at].endswith(".py"):
            return at
        if values[at] == "-m" and at + 1 < len(values) and values[at + 1] not in _MODULES:
            return at + 1
    return None


def _options(words: Sequence[Word]) -> tuple[list[_Option], tuple[str, ...]]:
    """Return the options of a command as argparse takes them, and the words before the first."""
    groups: list[list[Word]] = []
    positional: list[str] = []
    for word in words:
        if word.text.startswith("--"):
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        elif word.value is not None:
            positional.append(word.value)
    found = []
    for flag, *behind in groups:
        name, is_joined, joined = flag.text[2:].partition("=")
        name = name.replace("-", "_")
        texts = [word.text for word in behind]
        texts = [joined, *texts] if is_joined else texts
        kind = installed_fields().get(OLDER_NAMES.get(name, name), "")
        is_text = _TEXT.fullmatch(kind) is not None
        values = [
            NotLiteral(each.replace(UNKNOWN, ""), flag.line)
            if UNKNOWN in each
            else (each if is_text else _typed(each))
            for each in texts
        ]
        value = True if not values else values[0] if len(values) == 1 else values
        if (switched := _switched_off(name)) and not values:
            name, value = switched, False
        found.append(_Option(name, (flag, *behind), value))
    return found, tuple(positional)


def _switched_off(name: str) -> str:
    """Return the argument that HfArgumentParser's `--no_NAME` switches off; empty for any other option."""
    fields = installed_fields()
    rest = name.removeprefix("no_")
    is_switch = rest != name and name not in fields and fields.get(rest, "").startswith("bool")
    return rest if is_switch else ""


def _typed(text: str) -> Any:
    """Return the value of a word: a number, True or False, JSON, or the text."""
    if text.lower() in ("true", "false", "yes", "no"):
        return text.lower() in ("true", "yes")
    if text in ("None", "null"):
        return None
    if len(text) > user_text.MAX_DIGITS and text[:1] not in ("{", "["):
        return text
    for kind in (int, float):
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            continue
        return value if abs(value) < float("inf") else text
    if text[:1] in ("{", "["):
        try:
            return user_text.load_json(text)
        except (ValueError, RecursionError):
            return text
    return text


def _with(text: str, command: Command, name: str, value: Any, after: Sequence[str]) -> str:
    """Return the text with another value of one option; None: without it."""
    if name == "env":
        return _with_variables(text, command, value or {})
    own = [
        option
        for option in command.options
        if option.name == name and all(word.is_own for word in option.words)
    ]
    if value is None:
        for option in reversed(own):
            before = text[: option.words[0].start]
            text = _GAP_BEFORE.sub("", before) + text[option.words[-1].end :]
        return text
    said = _said(value)
    if own and own[-1] is next(o for o in reversed(command.options) if o.name == name):
        flag, *values = own[-1].words
        there, is_joined, _ = flag.source.partition("=")
        there = f"--{name}" if _switched_off(there[2:].replace("-", "_")) else there
        new = f"{there}{is_joined or ' '}{said}"
        return text[: flag.start] + new + text[(values or [flag])[-1].end :]
    beside = [option for option in command.options if option.name in after]
    known = (beside or command.options)[-1:]
    place = known[0].words[-1].end if known else command.words[-1].end
    broken = re.search(r"\\(\r?\n[ \t]*)", text[command.words[0].start : command.words[-1].end])
    gap = f" \\{broken[1]}" if broken else " "
    return f"{text[:place]}{gap}--{name} {said}{text[place:]}"


def _with_variables(text: str, command: Command, wanted: Mapping[str, Any]) -> str:
    """Return the text with another value of one variable of the environment."""
    for name in VARIABLES:
        value: str | None = wanted.get(name)
        if value == command.content.get("env", {}).get(name):
            continue
        said = f"{name}={shlex.quote(value) if value else ''}"
        word = command.variables.get(name)
        if word is not None:
            return text[: word.start] + said + text[word.end :]
        start = text.rfind("\n", 0, command.words[0].start) + 1
        return f"{text[:start]}export {said}\n{text[start:]}"
    return text


def _said(value: Any) -> str:
    """Return a value as words of a shell."""
    import json

    if isinstance(value, list | tuple):
        return " ".join(map(_said, value))
    return shlex.quote(json.dumps(value) if isinstance(value, dict) else str(value))
