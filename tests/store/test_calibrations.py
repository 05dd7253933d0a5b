"""Calibrations of cards in the user's own database: the newest of a card as it is set now counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import sqlalchemy

from autotune.catalogue.nvml import CardIdentity
from autotune.catalogue.own_rates import OwnRates
from autotune.errors import StorageError
from autotune.records.calibration import Calibration
from autotune.records.fingerprint import Fingerprint
from autotune.store import calibrations

CARD = CardIdentity(name="NVIDIA T4", driver="580", power_limit_watts=70.0, sm_clock_mhz=1590)
FIRST = Calibration(
    made_on="2026-11-23",
    card=CARD,
    fingerprint=Fingerprint(device="NVIDIA T4", driver="580", cuda="13", versions=(), allocator=""),
    rates=OwnRates(host_factor=1.5),
    residuals=(),
    timed=(),
)
SECOND = dataclasses.replace(FIRST, rates=OwnRates(host_factor=2.0))


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the user's own database, which is not there yet."""
    monkeypatch.delenv(calibrations.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return f"sqlite:///{tmp_path}/data/autotune/autotune.db"


def test_the_database_is_the_users_own_or_the_one_that_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calibrations.address() == url
    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibrations.address() == f"sqlite:///{tmp_path}/.local/share/autotune/autotune.db"
    monkeypatch.setenv(calibrations.VARIABLE, "sqlite:///named.db")
    assert calibrations.address() == "sqlite:///named.db"


def test_the_newest_of_a_card_as_it_is_set_counts(url: str, tmp_path: Path) -> None:
    assert calibrations.newest(CARD) is None
    assert list(tmp_path.iterdir()) == []
    calibrations.add(FIRST)
    calibrations.add(SECOND)
    capped = dataclasses.replace(CARD, power_limit_watts=50.0)
    calibrations.add(dataclasses.replace(FIRST, card=capped, made_on="2026-11-24"))
    calibrations.add(dataclasses.replace(FIRST, card=dataclasses.replace(CARD, name="NVIDIA L4")))
    assert calibrations.newest(CARD) == SECOND
    assert calibrations.newest(dataclasses.replace(CARD, driver="590")) == SECOND
    found = calibrations.newest(capped)
    assert found is not None
    assert found.made_on == "2026-11-24"
    assert calibrations.newest(dataclasses.replace(CARD, sm_clock_mhz=1000)) is None
    # It is the same database under its address, and another one is another.
    assert calibrations.newest(CARD, url) == SECOND
    other = f"sqlite:///{tmp_path}/other.db"
    assert calibrations.newest(CARD, other) is None
    calibrations.add(FIRST, other)
    assert calibrations.newest(CARD, other) == FIRST
    assert calibrations.newest(CARD) == SECOND


@pytest.mark.parametrize("record", ["no JSON", "{}", "[]"])
def test_a_row_that_cannot_be_read_is_passed_over(url: str, record: str) -> None:
    calibrations.add(FIRST)
    calibrations.add(SECOND)
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE autotune_calibrations SET record = ? WHERE id = 2", (record,)
        )
    engine.dispose()
    assert calibrations.newest(CARD) == FIRST


def test_a_damaged_database_is_said(url: str, tmp_path: Path) -> None:
    file = tmp_path / "data" / "autotune" / "autotune.db"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no database at all" * 100)
    for ask in (lambda: calibrations.newest(CARD), lambda: calibrations.add(FIRST)):
        with pytest.raises(StorageError, match="cannot be used"):
            ask()
