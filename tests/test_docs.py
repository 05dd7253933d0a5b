"""README.md and docs/: links lead somewhere, names exist, commands have the options that they show."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from autotune.cli import cli
from tests.test_rooms import FACTS, FUNNEL, NOUNS, ROOMS

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GROUPS = {"the facts": FACTS, "the nouns": NOUNS, "the funnel": FUNNEL, "none": ()}

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda path: str(path.relative_to(ROOT)).replace(".md", "")
)


def missing_links(page: Path) -> list[str]:
    """The links of a page to files that are not there."""
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    inside = [target for target in targets if not re.match(r"[a-z]+:", target)]
    return [target for target in inside if not (page.parent / target).exists()]


def missing_files(page: Path) -> list[str]:
    """The paths of this repository that a page names in its prose, and that are not there."""
    folders = "autotune|docs|examples|search_spaces|studies|tests|tools|validation"
    named = re.findall(rf"`(?:python )?((?:{folders})/[\w./-]+)`", page.read_text(encoding="utf-8"))
    modules = re.findall(r" -m ((?:tools|validation)[\w.]*)", page.read_text(encoding="utf-8"))
    places = [ROOT / module.replace(".", "/") for module in modules]
    named += [str(p) for p in places if not (p.is_dir() or p.with_suffix(".py").is_file())]
    made_by_find = re.compile(r"studies/(autotune\.db|MACHINE|qwen2\.5)")
    return [name for name in named if not (ROOT / name).exists() and not made_by_find.match(name)]


def missing_names(page: Path) -> list[str]:
    """The dotted names of the package that a page has, and that are not there."""
    names = re.findall(r"`(autotune(?:\.\w+)+)`", page.read_text(encoding="utf-8"))
    return [name for name in names if not is_there(name)]


def is_there(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        path = ROOT.joinpath(*parts[:length])
        if not (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()):
            continue
        rest = parts[length:]
        if (
            module.startswith("autotune.worker") and "client" not in parts
        ):  # importing it takes torch
            text = path.with_suffix(".py").read_text(encoding="utf-8")
            return not rest or f"\ndef {rest[0]}(" in text
        found = importlib.import_module(module)
        for part in rest:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def shown_commands(page: Path) -> Iterator[list[str]]:
    """The words of each line of a page's code that starts `autotune COMMAND`."""
    for line in page.read_text(encoding="utf-8").splitlines():
        for text in re.findall(r"^    (autotune .*)", line) or re.findall(
            r"`(autotune [^`]*)`", line
        ):
            if not re.search(r"[|\]$]|\.\.\.|COMMAND", text):
                yield shlex.split(text, comments=True)[1:]


def unknown_options(words: list[str]) -> list[str]:
    """The commands and options among those words that the command line does not have, or that they lack.

    A command alone is its name; one with options has all that it needs.
    """
    command: click.Command = cli
    known = {option for parameter in cli.params for option in parameter.opts}
    unknown = []
    for word in words:
        if isinstance(command, click.Group) and not word.startswith("-"):
            found = command.get_command(click.Context(command), word)
            if found is None:
                return [*unknown, word]
            command = found
            known |= {option for parameter in command.params for option in parameter.opts}
        elif word.startswith("--") and word.split("=")[0] not in known:
            unknown.append(word)
    if any(word.startswith("--") for word in words):
        needed = [
            each for each in command.params if isinstance(each, click.Option) and each.required
        ]
        unknown += [each.opts[0] for each in needed if not {*each.opts} & {*words}]
    return unknown


@each_page
def test_its_links_lead_to_files(page: Path) -> None:
    assert missing_links(page) == []


@each_page
def test_the_files_that_it_names_are_there(page: Path) -> None:
    if page.name != "CHANGELOG.md":  # which names what has gone
        assert missing_files(page) == []


@each_page
def test_the_names_that_it_shows_are_there(page: Path) -> None:
    assert missing_names(page) == []


@each_page
def test_its_commands_are_understood(page: Path) -> None:
    if page.name != "CHANGELOG.md":
        assert [unknown_options(words) for words in shown_commands(page)] == [
            [] for _ in shown_commands(page)
        ]


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](page.md#part) [b](gone.md) [c](https://example.com) `studies/gone/` `tests/conftest.py`\n"
        "`python -m tools.gone`\n"
        "`autotune.api.find` `autotune.api.gone` `autotune.worker.trace.step.gone`\n\n"
        "    autotune find --model M --gone 1\n    autotune gone\n    autotune max --what gpu\n"
        "    autotune export S --format all\n",
        encoding="utf-8",
    )
    assert missing_links(page) == ["gone.md"]
    assert missing_files(page) == ["studies/gone/", str(ROOT / "tools/gone")]
    assert missing_names(page) == ["autotune.api.gone", "autotune.worker.trace.step.gone"]
    assert [unknown_options(words) for words in shown_commands(page)] == [
        ["--gone"],
        ["gone"],
        [],
        ["--out"],
    ]


def test_the_headings_that_code_cites_are_there() -> None:
    headings = re.findall(
        r"^## (.*)$", (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    code = [*(ROOT / "autotune").rglob("*.py"), *(ROOT / "tests").rglob("test_*.py")]
    cited = re.compile(r'docs/ARCHITECTURE\.md,\s+"([^"]+)"')
    found = {name for path in code for name in cited.findall(path.read_text(encoding="utf-8"))}
    assert found
    assert found <= set(headings)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_architecture_has_the_table_of_rooms() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("| room | imports from |")[2].partition("\n\n")[0]
    shown = {}
    for row in table.splitlines()[2:]:
        rooms, others = row.strip("| ").split(" | ")
        for room in rooms.split(", "):
            shown[room.strip("`").replace("the package itself", "")] = {
                each
                for other in others.split(", ")
                for each in GROUPS.get(other, (other.strip("`"),))
            }
    assert shown == {room: set(others) for room, others in ROOMS.items()}
    for group, rooms in GROUPS.items():
        if group != "none":
            (row,) = re.findall(rf"^\| {group} \| (.*) \|$", text, re.MULTILINE)
            named = [GROUPS.get(name, (name.strip("`"),)) for name in row.split(", ")]
            assert {each for names in named for each in names} == set(rooms)


def test_the_architecture_names_every_room_in_its_tree() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.partition("```\nautotune/\n")[2].partition("```")[0]
    folders = {p.parent.name for p in (ROOT / "autotune").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)) == folders
