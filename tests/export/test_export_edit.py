from __future__ import annotations

import json
import re

import pytest
import yaml

from autotune.export.base.edit import KeyEdit, edited

FILE = """\
# what this is
a: 1   # one

b:
- x
- y # why
c: {d: 1, e: 2}
f:
  g: true  # on
  h: false

i:
last: "quoted"
"""


@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        (KeyEdit(key="a", value=2), "a: 1   # one", "a: 2   # one"),
        (KeyEdit(key="a", value="yes"), "a: 1   # one", "a: 'yes'   # one"),
        (KeyEdit(key="a", value=None), "a: 1   # one\n", ""),
        (KeyEdit(key="b", value=["z"]), "b:\n- x\n- y # why", "b: [z] # why"),
        (KeyEdit(key="b", value=None), "b:\n- x\n- y # why\n", ""),
        (KeyEdit(key="c.d", value=3), "{d: 1, e: 2}", "{d: 3, e: 2}"),
        (KeyEdit(key="c.d", value=None), "{d: 1, e: 2}", "{e: 2}"),
        (KeyEdit(key="c.e", value=None), "{d: 1, e: 2}", "{d: 1}"),
        (KeyEdit(key="c.f", value="x"), "{d: 1, e: 2}", "{d: 1, e: 2, f: x}"),
        (KeyEdit(key="f.g", value=False), "g: true  # on", "g: false  # on"),
        (KeyEdit(key="f.g", value=None), "  g: true  # on\n", ""),
        (KeyEdit(key="f.new", value=1), "  h: false\n", "  h: false\n  new: 1\n"),
        (KeyEdit(key="i", value=5), "i:\n", "i: 5\n"),
        (KeyEdit(key="i", value={"z": 1, "a": 2}), "i:\n", "i: {z: 1, a: 2}\n"),
        (KeyEdit(key="new", value=1), 'last: "quoted"\n', 'last: "quoted"\nnew: 1\n'),
        (KeyEdit(key="new", value=1, after=("a",)), "# one\n", "# one\nnew: 1\n"),
        (KeyEdit(key="n.m", value=1), '"quoted"\n', '"quoted"\nn: {m: 1}\n'),
        (KeyEdit(key="new", value=1, instead="a"), "a: 1   # one", "new: 1   # one"),
        (KeyEdit(key="absent", value=None), "", ""),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_one_change(change: KeyEdit, old: str, new: str, newline: str) -> None:
    assert FILE.count(old) == 1 or not old
    text = FILE.replace("\n", newline)
    wanted = FILE.replace(old, new, 1).replace("\n", newline)
    new, keeps_comments = edited(text, [change])
    assert keeps_comments
    assert re.sub(" +#", " #", new) == re.sub(" +#", " #", wanted)


INDENTED = """\
# top
---
f:   # on f
    # about g
    g: 1
    # about h
    h:
      - x  # x
      # about y
      - y

# about i
i: "1e-4"
# end
"""


@pytest.mark.parametrize(
    ("change", "gone", "new"),
    [
        (KeyEdit(key="f.g", value=None), "    g: 1\n", ""),
        (
            KeyEdit(key="f.h", value=None),
            "    h:\n      - x  # x\n      # about y\n      - y\n",
            "",
        ),
        (KeyEdit(key="f.k", value=2, after=("g",)), "    g: 1\n", "    g: 1\n    k: 2\n"),
        (KeyEdit(key="f.k", value=2), "      - y\n", "      - y\n    k: 2\n"),
        (KeyEdit(key="i", value="1e-5"), '"1e-4"', "1e-5"),
        (KeyEdit(key="k", value=2, instead="i"), 'i: "1e-4"', "k: 2"),
        (KeyEdit(key="f", value=None), INDENTED[10 : INDENTED.index("\n# about i")], ""),
    ],
)
def test_a_comment_stays_with_the_key_below_it_and_indentation_as_it_was(
    change: KeyEdit, gone: str, new: str
) -> None:
    assert INDENTED.count(gone) == 1
    found, keeps_comments = edited(INDENTED, [change])
    assert keeps_comments
    assert re.sub(" +#", " #", found) == re.sub(" +#", " #", INDENTED.replace(gone, new))


def test_new_keys_stand_in_the_order_in_which_they_are_given() -> None:
    changes = [KeyEdit(key=key, value=1, after=("a",)) for key in "xyz"]
    assert edited("a: 1\nb: 2\n", changes)[0] == "a: 1\nx: 1\ny: 1\nz: 1\nb: 2\n"


def test_a_file_without_a_last_line_break() -> None:
    changes = [KeyEdit(key="b", value=2), KeyEdit(key="c", value=3)]
    assert edited("a: 1", changes) == ("a: 1\nb: 2\nc: 3", True)


def test_a_whole_mapping_that_empties_goes() -> None:
    text = "a: 1\nb:\n  c: 2\n"
    assert yaml.safe_load(edited(text, [KeyEdit(key="b.c", value=None)])[0]) == {"a": 1}


@pytest.mark.parametrize(
    "text",
    ["a: &x 1\nb: *x # same\n", "base: &base {a: 1}\nb:\n  <<: *base # merged\n  c: 1\n"],
    ids=["alias", "merge"],
)
def test_what_cannot_be_edited_in_place_is_still_right(text: str) -> None:
    """The value of an alias stands elsewhere: another key would change with it."""
    key = "b" if "*x" in text else "b.a"
    new, _ = edited(text, [KeyEdit(key=key, value=7)])
    content = yaml.safe_load(text)
    if key == "b":
        content["b"] = 7
    else:
        content["b"]["a"] = 7
    assert yaml.safe_load(new) == content


def test_an_anchored_value_leaves_its_alias_what_it_was() -> None:
    new, keeps_comments = edited("a: &x 1 # one\nb: *x\n", [KeyEdit(key="a", value=2)])
    assert yaml.safe_load(new) == {"a": 2, "b": 1}
    assert keeps_comments == ("# one" in new)


def test_a_key_that_is_there_twice_costs_the_comments_and_that_is_said() -> None:
    new, keeps_comments = edited("a: 1 # one\na: 2\nb: 3\n", [KeyEdit(key="b", value=4)])
    assert yaml.safe_load(new) == {"a": 2, "b": 4}
    assert not keeps_comments


@pytest.mark.parametrize(
    ("text", "change", "wanted"),
    [
        ('{"a": 1, "b": 2}', KeyEdit(key="b", value=None), '{"a": 1}'),
        ('{"a": 1, "b": 2}', KeyEdit(key="a", value="x"), '{"a": "x", "b": 2}'),
        ('{\n\t"a": 1\n}\n', KeyEdit(key="b", value=True), '{\n\t"a": 1,\n\t"b": true\n}\n'),
        ('{\r\n   "a": "ü"\r\n}', KeyEdit(key="a", value=1), '{\r\n   "a": 1\r\n}'),
        ('{"a": 1}\n', KeyEdit(key="a", value=None), "{}\n"),
    ],
)
def test_json(text: str, change: KeyEdit, wanted: str) -> None:
    new, _ = edited(text, [change])
    assert new == wanted
    json.loads(new)
