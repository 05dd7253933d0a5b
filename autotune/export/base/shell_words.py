"""Words of a shell script, split as bash splits them, with their places; nothing is run.

A variable has the value that the script gives it before, by default where its arguments may give it another.
What only running would tell (`$1`, `$(date)`) stays as it is, and is marked.

Known limitations
- Branches, loops and functions are read from top to bottom, as if each line ran once.
- Here-documents are not told from commands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.export.base.literals import ARITHMETIC

_INNER = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_WORD = (
    rf"""(?:\\[^\r\n]|'[^']*'|"(?:\\.|[^"\\])*"|\$\({_INNER}\)|\$\{{[^}}]{{0,300}}\}}|`[^`]*`"""
    r"""|[^\s;&|<>()'"`\\])+"""
)
_TOKEN = re.compile(
    rf"""(?P<gap>(?:[ \t\r\f\v]|\\(?:\r?\n|\Z))+|\#[^\n]*)
    |(?P<end>\n|[;&|()]+)
    |(?P<redirect>\d*[<>]+&\d+|\d*[<>]+&?[ \t]*(?:{_WORD})?)
    |(?P<word>{_WORD})""",
    re.VERBOSE | re.DOTALL,
)
_PIECE = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|(?P<plain>[^'"\\]+)""",
    re.DOTALL,
)
_EXPANDED = re.compile(
    rf"""\\(?P<escaped>["$`\\])|(?P<joined>\\\r?\n)
    |\$(?P<name>\w+)|\$\{{(?P<braced>\w+)(?P<all>\[[@*]\])?(?::?-(?P<usual>[^}}$`]*))?\}}
    |\$\(\((?P<sum>{_INNER})\)\)
    |(?P<unknown>\$\({_INNER}\)|\$\{{[^}}]{{0,300}}\}}|\$[@*\#?!$-]|`[^`]*`)""",
    re.VERBOSE,
)
"""Expansions of a shell, within double quotes and without."""
ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_QUOTED_ARRAY = re.compile(r'"\$\{(\w+)\[@\]\}"')
_GAP, UNKNOWN = "\0", "\1"
"""Stands between words of a variable; stands before what only running would tell. No script has them."""
_MOST_OF_A_SUM = 10**15


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the script with its place."""

    text: str
    """Text that it stands for, with UNKNOWN before what only running would tell."""
    source: str
    line: int
    start: int
    is_own: bool = True
    """Whether it stands there alone, not among others of a variable."""

    @property
    def end(self) -> int:
        return self.start + len(self.source)

    @property
    def value(self) -> str | None:
        """Text that it stands for; None where only running would tell."""
        return None if UNKNOWN in self.text else self.text

    @property
    def shown(self) -> str:
        """Text that it stands for as far as that is known, else as the script has it."""
        return self.text.replace(UNKNOWN, "")


_Variables = dict[str, tuple[str, ...]]
"""Words of each variable."""


def _tokens(text: str) -> Iterator[tuple[str | None, str, int, int]]:
    """Yield the kind, text, line and place of each token. Raises ValueError for what is not closed."""
    place, line = 0, 1
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError(f"line {line}: a quotation mark or a bracket is not closed")
        yield token.lastgroup, token[0], line, place
        place = token.end()
        line += token[0].count("\n")


def commands(text: str, environment: dict[str, Word]) -> Iterator[list[Word]]:
    """Yield the words of each command; collect the assignments in `environment`.

    Raises ValueError for a quotation mark or a bracket that is not closed.
    """
    variables: _Variables = {}
    words: list[Word] = []
    array = ""
    """Name of the array that is being read."""
    for kind, source, line, start in _tokens(text):
        if array:
            if kind == "word":
                variables[array] = (*variables[array], *_words_of(source, variables))
            elif kind == "end" and ")" in source:
                array = ""
        elif kind == "end":
            last = ASSIGNED.fullmatch(words[-1].source) if words else None
            is_empty = last is not None and not last["value"] and words[-1].end == start
            if last is not None and is_empty and source.startswith("("):
                array = last["name"]
                variables[array] = variables.get(array, ()) if last["more"] else ()
                continue
            if words:
                yield _evaluated(words)
            words = []
        elif kind == "word":
            named = ASSIGNED.fullmatch(source)
            opens = text[start + len(source) :][:1] == "("
            if named is not None and not opens and all(map(_is_before_a_command, words)):
                said = _text_of(named["value"], variables)
                before = variables.get(named["name"], ())
                if before and _is_given(said):
                    said = "".join(before)  # A loop over the script's arguments has not run.
                    before = ()
                variables[named["name"]] = ("".join([*(before if named["more"] else ()), said]),)
                environment[named["name"]] = Word(said, source, line, start)
            values = _words_of(source, variables)
            words += [Word(each, source, line, start, len(values) == 1) for each in values]
    if words:
        yield _evaluated(words)


def _evaluated(words: list[Word]) -> list[Word]:
    """Return the words of a command; those that `eval` makes of its own."""
    if words[0].text != "eval" or len(words) == 1:
        return words
    last = words[-1]
    found = [
        Word(each, last.source, last.line, last.start, is_own=False)
        for kind, source, _, _ in _tokens(" ".join(word.text for word in words[1:]))
        if kind == "word"
        for each in _words_of(source, {})
    ]
    return [words[0], *found]


def _is_before_a_command(word: Word) -> bool:
    is_said = word.source in ("export", "declare", "local", "env")
    return is_said or ASSIGNED.fullmatch(word.source) is not None


def _is_given(text: str) -> bool:
    """Return whether a text is one argument of the script, `$2` or `${1#*=}`: it is taken to have none."""
    return re.fullmatch(rf"{UNKNOWN}\$(\d|\{{\d+[^}}]*\}})", text) is not None


def _words_of(source: str, variables: _Variables) -> Sequence[str]:
    """Return the words that a word of the script stands for."""
    if source.strip('"') in ("$@", "$*"):
        return []  # The script is taken to be given nothing.
    array = _QUOTED_ARRAY.fullmatch(source)
    known = None if array is None else variables.get(array[1])
    if known is not None:
        return known
    text = _text_of(source, variables, gap=_GAP)
    return [each for each in text.split(_GAP) if each] if _GAP in text else [text]


def _text_of(source: str, variables: _Variables, *, gap: str = " ") -> str:
    """Return a word of the script without quotation marks, with what a shell puts in.

    `gap`: stands for white space of variables outside of quotation marks.
    """
    text = ""
    for piece in _PIECE.finditer(source):
        part: str = piece[piece.lastgroup or 0]
        if piece.lastgroup in ("double", "plain"):
            part = _expanded(part, variables, gap if piece.lastgroup == "plain" else None)
        text += part
    return text


def _expanded(text: str, variables: _Variables, gap: str | None) -> str:
    """Return the text with what a shell puts in.

    `gap`: stands for the white space of what is put in, None for all that there is.
    """

    def put_in(found: re.Match[str]) -> str:
        if found["escaped"] or found["joined"]:
            return found["escaped"] or ""
        known = variables.get(found["name"] or found["braced"] or "")
        said = "".join(known or ())
        is_empty = not said and ":-" in found[0]
        if found["usual"] is not None and (is_empty or _is_given(said)):
            known = None
        new: str | None = found["usual"]
        if known is not None:
            new = " ".join(known if found["all"] else known[:1])
        elif found["sum"] is not None:
            new = _sum(found["sum"], variables)
        if new is None:
            return f"{UNKNOWN}{found[0]}"
        return new if gap is None or UNKNOWN in new else re.sub(r"\s+", gap, new)

    return _EXPANDED.sub(put_in, text)


def _sum(text: str, variables: _Variables) -> str | None:
    """Return what a shell's arithmetic comes to; None where that is not told."""

    def number(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value) if abs(value) < _MOST_OF_A_SUM:
                return value
            case ast.Name(id=name):
                return int("".join(variables[name]))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -number(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return int(ARITHMETIC[type(op)](number(left), number(right)))
        raise ValueError

    try:
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()
        return str(number(ast.parse(plain, mode="eval").body))
    except (ArithmeticError, LookupError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
