"""The room that predictions leave, against the published rows that it is derived from."""

from __future__ import annotations

import csv
import json
import re

import pytest

from autotune.catalogue import gpu_rows
from autotune.common.units import MIB
from autotune.space import headroom
from tools.gpu_check.records import read_records
from validation import no_card_room
from validation.headroom import (
    ODDS,
    README,
    STUDIES,
    Line,
    Tail,
    contexts,
    held_out_contexts,
    held_out_models,
    held_out_runs,
    quantized_tail,
    reserved_of_cards,
    reserved_of_t4,
    tables,
)


def test_the_constants_are_those_of_the_rows() -> None:
    shares = [share for runs in reserved_of_cards().values() for share in runs.values()]
    tail, line = Tail.of(shares), Line.of(contexts())
    assert round(tail.over_odds, 2) == headroom.RESERVED_OVER_ODDS
    assert round(tail.mean_share, 4) == headroom.RESERVED_OVER_SHARE
    of_4_bits = quantized_tail(reserved_of_t4("rows.json", "nf4"))
    assert round(of_4_bits.over_odds, 2) == headroom.QUANTIZED_OVER_ODDS
    assert round(of_4_bits.mean_share, 4) == headroom.QUANTIZED_OVER_SHARE
    assert round(line.spread_mib) * MIB == headroom.CONTEXT_SPREAD_BYTES
    assert round(line.mib) * MIB == gpu_rows.CONTEXT_BYTES
    assert round(line.bytes_per_thread) == gpu_rows.CONTEXT_BYTES_PER_THREAD


def test_the_tables_are_what_the_rows_give() -> None:
    text = README.read_text()
    for name, content in tables().items():
        assert f"<!-- {name} -->\n{content}\n<!-- end {name} -->\n" in text


def test_what_was_not_fitted_is_covered() -> None:
    """Runs held out by their source, and processes by their card, at 99 %; two of prefix tuning are not."""
    at = ODDS.index(0.99)
    by_source = reserved_of_cards()
    missed = {
        name: len(by_source[name]) - covered[at]
        for name, covered in held_out_runs(by_source).items()
    }
    assert missed == {"peft": 2, "rasbt": 0, "hfperf": 0, "blind": 0}
    assert sum(counts[at] for counts in held_out_contexts(contexts()).values()) == len(contexts())


def test_steps_with_4_bit_weights_are_covered_by_their_own_tail() -> None:
    """Each model by the others at 99 %; of six models more all but three of 20 steps."""
    steps = reserved_of_t4("rows.json", "nf4")
    assert sum(map(len, steps.values())) == 43
    assert held_out_models(steps)[ODDS.index(0.99)] == 43
    most = headroom.quantized_share(0.99)
    further = reserved_of_t4("further_rows.json", "nf4")
    missed = {
        model: num for model, shares in further.items() if (num := sum(s > most for s in shares))
    }
    assert missed == {"Qwen2.5-7B-Instruct": 1, "Qwen2.5-Coder-1.5B-Instruct": 2}


def test_a_context_is_what_its_message_says() -> None:
    """The process less what torch allocated and what it held unallocated, in the message that is cited."""
    with (STUDIES / "headroom" / "contexts.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if " GiB - " in row["source"]]
    assert len(rows) >= 14
    for row in rows:
        figures = re.findall(r"([0-9.]+) (GiB|MiB)", row["source"])
        whole, *parts = [float(n) * (1024 if unit == "GiB" else 1) for n, unit in figures]
        assert whole - sum(parts) == pytest.approx(float(row["mib"]), abs=1)


def test_lengths_that_vary_fit_with_the_share_that_is_kept_for_them() -> None:
    """No run of studies/no-card/lengths.jsonl under so much more than full length ran out of memory."""
    lines = (STUDIES / "no-card" / "lengths.jsonl").read_text().splitlines()
    outcomes: dict[float, set[str]] = {}
    for record in map(json.loads, lines):
        if "budget" in record["case"]:
            outcomes.setdefault(record["case"]["budget"], set()).add(record["outcome"])
    kept = 1 + headroom.VARIED_SHARE
    assert outcomes[kept] == {"ok"}
    assert all("oom" in found for budget, found in outcomes.items() if budget < kept)


@pytest.mark.worker
def test_runs_that_need_a_larger_share_for_their_lengths_need_it_in_the_replay_too() -> None:
    """Those of studies/no-card/room.jsonl that ran out of memory with VARIED_SHARE."""
    records = read_records(STUDIES / "no-card" / "room.jsonl")
    needing = {
        ran.held: record
        for record in records
        if (ran := no_card_room.of_run(record)).failed == headroom.VARIED_SHARE
    }
    assert set(needing) == {0.15, 0.2}
    for held, record in needing.items():
        replayed = no_card_room.of_replay(record)
        assert replayed.failed is not None
        assert replayed.failed >= headroom.VARIED_SHARE
        assert replayed.held == held


def test_compiled_steps_fit_with_the_share_that_is_kept_for_them() -> None:
    lines = (STUDIES / "no-card" / "compiled_after.jsonl").read_text().splitlines()
    records = [
        record for record in map(json.loads, lines) if record["measurement"]["outcome"] == "ok"
    ]
    over = sorted(
        record["measurement"]["peak_reserved_bytes"] / record["prediction"]["peak_reserved_bytes"]
        - 1
        for record in records
    )
    assert len(over) > 20
    assert headroom.COMPILED_SHARE - 0.005 < over[-1] <= headroom.COMPILED_SHARE
