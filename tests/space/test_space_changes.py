"""Changes of a space: each is kept with its reason, and what changes nothing is not."""

from __future__ import annotations

from autotune.space.search_space import MethodSpace, SearchSpace
from autotune.space.space_changes import Changing, SpaceChange


def space(**methods: dict[str, tuple[object, ...]]) -> SearchSpace:
    sections = tuple(MethodSpace(method=name, domains=of) for name, of in methods.items())
    return SearchSpace(name="space", description="", methods=sections)


def test_what_is_different_is_kept_in_words_and_in_order() -> None:
    both, eager = {"attention": ("sdpa", "eager")}, {"attention": ("eager",)}
    changing = Changing(space(full={**both, "liger": (False, True)}, lora=both))
    changing.to(space(full={**eager, "liger": (False, True)}, lora=eager), "the model")
    changing.to(space(full=eager), "--method")
    assert list(map(str, changing.changes)) == [
        "the model: full, lora: attention: sdpa attention, eager attention -> eager attention",
        "--method: full: liger: no Liger kernels, Liger kernels -> by default; lora: left out",
    ]


def test_a_setting_that_was_not_there_is_called_none() -> None:
    changing = Changing(space(full={"num_generations": (None,), "kl_beta": (None,)}))
    changing.to(space(full={"num_generations": (8,), "kl_beta": (0.05,)}), "grpo")
    assert list(map(str, changing.changes)) == [
        "grpo: full: num_generations: none -> 8 completions a prompt; full: kl_beta: none -> KL 0.05"
    ]


def test_what_changes_nothing_is_no_change() -> None:
    changing = Changing(space(full={}), (SpaceChange(why="before", what=("x",)),))
    changing.to(space(full={}), "nothing")
    assert [change.why for change in changing.changes] == ["before"]
