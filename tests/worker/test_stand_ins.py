"""Attributes of other libraries' modules that are replaced for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autotune.worker.trace.stand_ins import replaced, without_values

pytestmark = pytest.mark.worker


class Base:
    inherited = "of the base"


class Owner(Base):
    none = None
    number = 1


@pytest.mark.parametrize("owner", [Owner, SimpleNamespace(none=None, number=1)])
def test_what_was_replaced_is_as_before(owner: object) -> None:
    """An attribute that was None is None again; one that was not there is gone."""
    before = dict(vars(owner))
    values = {"none": 5, "number": None, "new": 6, "inherited": 7}
    with replaced([(owner, name, value) for name, value in values.items()]):
        assert {name: getattr(owner, name) for name in values} == values
    assert dict(vars(owner)) == before
    assert Owner.inherited == "of the base"


def test_what_was_replaced_is_as_before_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), replaced([(Owner, "none", 1 / 2), (Owner, "new", 6)]):
        _ = 1 / 0
    assert Owner.none is None
    assert not hasattr(Owner, "new")


def test_what_was_replaced_twice_is_as_before() -> None:
    with replaced(
        [(Owner, "number", 2), (Owner, "number", 3), (Owner, "new", 1), (Owner, "new", 2)]
    ):
        assert Owner.number == 3
    assert Owner.number == 1
    assert not hasattr(Owner, "new")


def test_where_one_cannot_be_set_those_before_it_are_as_before() -> None:
    with pytest.raises(TypeError), replaced([(Owner, "number", 2), (int, "real", 3)]):
        raise AssertionError
    assert Owner.number == 1


def test_weights_without_values_have_their_shapes() -> None:
    before = torch.nn.init.kaiming_uniform_
    with without_values(), torch.device("meta"):
        linear = torch.nn.Linear(3, 5)
    assert linear.weight.shape == (5, 3)
    assert torch.nn.init.kaiming_uniform_ is before
