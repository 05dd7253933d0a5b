"""What a night writes: digests with whatever names there are, files that merge, relatives, the journal."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from nights_of import CONFIG, HERE, NOW, cell, night

from autotune.catalogue import gpus
from autotune.cli import main
from autotune.common import json_records
from autotune.errors import StorageError
from autotune.nightly import draw, drift, files, relatives, run
from autotune.nightly.digest import Digest, Done
from autotune.nightly.history import Night, night_from_dict
from autotune.nightly.journal import Journal, locked
from autotune.nightly.plan import Planned, Prepared
from autotune.probe import fingerprint as fingerprints

NASTY = "<script>alert(1)</script>|`x`\n# head"
H100 = dataclasses.replace(HERE, device="NVIDIA H100 80GB HBM3")
RTX_4080 = dataclasses.replace(HERE, device="NVIDIA GeForce RTX 4080")
T4 = dataclasses.replace(HERE, device="Tesla T4")


def planned(name: str = "cell", nights: tuple[Night, ...] = (), **changes: Any) -> Planned:
    values: dict[str, Any] = {
        "cell": cell(name),
        "state": "new",
        "reason": "never tuned on this machine",
        "nights": nights,
        "measures": False,
        "searches": True,
        "expected_seconds": 600.0,
        "expected_gain": 1.0,
        **changes,
    }
    return Planned(**values)


def digest(*done: Done, **changes: Any) -> Digest:
    values: dict[str, Any] = {
        "made_at": NOW.isoformat(),
        "machine": "rtx-4090",
        "fingerprint": HERE,
        "done": done,
        "left": (),
        "elapsed_seconds": 605.0,
        **changes,
    }
    return Digest(**values)


REGRESSED = Done(
    planned=planned(
        "slower", (night(3, (1000.0, 1001.0)), night(2, (950.0, 951.0), kind=drift.SUSPECT))
    ),
    night=night(
        0.0,
        (948.0, 952.0),
        kind=drift.REGRESSION,
        reason="on 2 nights; since driver 580.10 -> 590.2",
        change=-0.05,
        low=-0.07,
        high=-0.03,
        num_nights=2,
    ),
)


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_digest_says_what_changed_by_how_much_and_since_when() -> None:
    for text in (draw.markdown(digest(REGRESSED)), Page(draw.html(digest(REGRESSED))).text):
        assert "1 cell: 1 regression" in text
        assert "-5.0 %" in text
        assert "-7.0 % to -3.0 %" in text
        assert "driver 580.10 -> 590.2" in text.replace("\\", "")
        assert "950" in text
    assert "1,000 950 950" in draw.markdown(digest(REGRESSED))
    assert "2026-03-01 02:17 UTC, 10 min 05 s. Everything here was measured." in draw.markdown(
        digest(REGRESSED)
    )
    failed = Done(planned=planned("none"), night=None, problem="No such file", exit_code=2)
    assert "## Answers" in draw.markdown(digest(REGRESSED, failed))
    assert "## Answers" not in draw.markdown(digest(failed))


def test_whatever_others_wrote_is_text() -> None:
    done = [
        Done(planned=planned(NASTY, reason=NASTY), night=None, problem=NASTY, exit_code=5),
        Done(planned=planned(NASTY), night=night(reason=NASTY)),
    ]
    found = digest(*done, left=(planned(NASTY, reason=NASTY),), notes=(NASTY,))
    page = Page(draw.html(found))
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    text = draw.markdown(found)
    assert "<script>" not in text
    assert not re.search(r"(?m)^# head", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) in (8, 5, 4) for row in rows)
    assert NASTY not in draw.digest_text(found, [])


def test_the_page_fetches_and_runs_nothing() -> None:
    page = draw.html(digest(REGRESSED))
    assert "default-src 'none'" in page
    assert not set(Page(page).tags) & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"(?:src|href)=", page)


def test_a_trend_has_a_point_per_night_within_its_frame() -> None:
    points = draw.trend_points(REGRESSED.nights)
    assert [point["kind"] for point in points] == ["new", "suspect", "regression"]
    assert points[0]["y"] < points[1]["y"], "slower is lower"
    assert all(0 <= p["x"] <= draw._WIDTH and 0 <= p["y"] <= draw._HEIGHT for p in points)
    # From margin to margin in equal steps; one night stands at the left, in the middle of the height.
    first, middle, last = (point["x"] for point in points)
    assert (first, last) == (draw._MARGIN, draw._WIDTH - draw._MARGIN)
    assert middle == draw._WIDTH / 2
    (alone,) = draw.trend_points([night()])
    assert (alone["x"], alone["y"]) == (draw._MARGIN, draw._HEIGHT / 2)
    assert points[0]["words"] == f"{REGRESSED.nights[0].made_at[:10]}: 1,000 tokens/s, new"
    # The fastest and the slowest are as far from the middle: a fifth of the speed fills the frame.
    high, low = (
        point["y"] for point in draw.trend_points([night(speeds=(900.0,)), night(speeds=(1100.0,))])
    )
    assert (high, low) == (draw._HEIGHT - draw._MARGIN, draw._MARGIN)
    assert Page(draw.html(digest(REGRESSED))).tags.count("circle") == 3


def test_a_digest_has_the_speeds_of_eight_nights() -> None:
    """Tonight's is the last of them."""
    earlier = tuple(night(20.0 - n, (100.0 + n, 100.0 + n)) for n in range(10))
    done = dataclasses.replace(REGRESSED, planned=planned("slower", earlier))
    text = draw.markdown(digest(done))
    assert "103 104 105 106 107 108 109 950" in text
    assert "102 103" not in text


def test_noise_does_not_look_like_news() -> None:
    flat = [night(speeds=(speed, speed)) for speed in (1000.0, 1004.0, 998.0)]
    heights = [point["y"] for point in draw.trend_points(flat)]
    assert max(heights) - min(heights) < 0.1 * draw._HEIGHT


def test_first_results_stand_beside_the_nearest_relatives() -> None:
    relative = night(fingerprint=RTX_4080, speeds=(500.0, 500.0))
    done = Done(planned=planned(), night=night(speeds=(700.0, 700.0)), relative=relative)
    text = draw.markdown(digest(done))
    # Of the catalogue: 1,008 GB/s to 717.
    assert "| cell | 700 | NVIDIA GeForce RTX 4080 | 500 | 1.40 x | 1.41 x |" in text
    assert "1.41 x" in Page(draw.html(digest(done))).text


def test_cards_are_as_far_apart_as_their_facts() -> None:
    """In logarithms, as sides of a box."""
    card = gpus.find_gpu("NVIDIA GeForce RTX 4090")
    bandwidth, peaks = card.memory_bandwidth_bytes_per_second, card.peak_flop_per_second
    assert bandwidth is not None
    for changes, apart in (
        ({"memory_bandwidth_bytes_per_second": 2 * bandwidth}, (2.0,)),
        ({"memory_bandwidth_bytes_per_second": bandwidth / 2}, (2.0,)),
        ({"memory_bandwidth_bytes_per_second": None}, (4.0,)),
        ({"capacity_bytes": 3 * card.capacity_bytes}, (3.0,)),
        ({"peak_flop_per_second": {}}, (4.0,)),
        ({"peak_flop_per_second": {"float16": peaks["bfloat16"]}}, ()),
        ({"architecture": "another", "capacity_bytes": 2 * card.capacity_bytes}, (1.5, 2.0)),
    ):
        other = dataclasses.replace(card, **changes)  # type: ignore[arg-type]
        expected = math.hypot(*map(math.log, apart))
        assert relatives.distance(card, other) == pytest.approx(expected)
        assert relatives.distance(other, card) == pytest.approx(expected)
    assert relatives.bandwidth_ratio(HERE.device, RTX_4080.device) == pytest.approx(
        1008 / 717, rel=1e-3
    )
    for devices in ((HERE.device, "AMD EPYC"), ("AMD EPYC", HERE.device)):
        assert relatives.bandwidth_ratio(*devices) is None


def test_a_cell_of_a_digest_in_json() -> None:
    relative = night(fingerprint=RTX_4080, speeds=(500.0, 500.0))
    seen = night(speeds=(700.0, 700.0), change=-0.05, low=-0.07, high=-0.03, elapsed_seconds=12.34)
    found = Done(planned=planned(), night=seen, relative=relative).to_dict()
    assert (found["kind"], found["evidence"]) == ("new", "measured")
    assert found["tokens_per_second"] == pytest.approx(700)
    assert (found["change"], found["interval"]) == (-0.05, [-0.07, -0.03])
    assert (found["num_probes"], found["elapsed_seconds"]) == (2, 12.3)
    assert found["trend"] == [[seen.made_at, seen.speed, "new"]]
    assert found["relative"]["tokens_per_second"] == pytest.approx(500)
    failed = Done(planned=planned(), night=None, problem="No such file", exit_code=2).to_dict()
    assert (failed["kind"], failed["problem"]) == ("failed", "No such file")
    assert (failed["num_probes"], failed["why"], failed["replaced"]) == (0, "", False)
    unknown = (
        "tokens_per_second",
        "evidence",
        "spread",
        "change",
        "interval",
        "config",
        "relative",
    )
    assert all(failed[name] is None for name in unknown)


def test_the_nearest_card_is_of_its_kind() -> None:
    nights = [night(fingerprint=each) for each in (H100, RTX_4080, T4)]
    nearest = relatives.nearest("NVIDIA GeForce RTX 4090", nights)
    assert nearest is not None
    assert nearest.fingerprint == RTX_4080
    assert relatives.nearest("AMD EPYC", nights) is None
    assert relatives.nearest("NVIDIA GeForce RTX 4090", [night()]) is None


@pytest.mark.parametrize(("ratio", "is_nearer"), [(1.4, True), (1.6, False), (1 / 1.6, False)])
def test_another_architecture_counts_like_half_more_of_something(
    ratio: float, is_nearer: bool
) -> None:
    card = gpus.find_gpu("NVIDIA GeForce RTX 4090")
    larger = dataclasses.replace(card, capacity_bytes=round(ratio * card.capacity_bytes))
    other = dataclasses.replace(card, architecture="another")
    assert relatives.distance(card, card) == 0
    assert (relatives.distance(card, larger) < relatives.distance(card, other)) is is_nearer


def test_files_of_machines_merge_by_copying(tmp_path: Path) -> None:
    question = {"model": "gpt2", "seq_len": 1024}
    for fingerprint in (HERE, T4):
        folder = files.machine_folder(tmp_path, fingerprint.device)
        nights = [night(fingerprint=fingerprint)]
        path = files.write(folder, "gpt2", question=question, nights=nights, backend="cuda")
        again = path.read_bytes()
        files.write(folder, "gpt2", question=question, nights=nights, backend="cuda")
        assert path.read_bytes() == again
    (tmp_path / "nvidia-geforce-rtx-4090" / "recommendations" / "broken.json").write_text("{")
    assert sorted(p.parent.parent.name for p in tmp_path.glob("*/recommendations/gpt2.json")) == [
        "nvidia-geforce-rtx-4090",
        "tesla-t4",
    ]
    (other,) = files.others(tmp_path, question, HERE.device)
    assert other.fingerprint == T4
    assert not [*files.others(tmp_path, {"model": "gpt3"}, HERE.device)]


def test_a_night_is_read_back_as_it_was() -> None:
    seen = night(change=0.1, low=0.05, high=0.15)
    assert night_from_dict(json.loads(json.dumps(json_records.plain(seen)))) == seen


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_second", []),
        ("tokens_per_second", [0.0]),
        ("made_at", "yesterday"),
        ("config", {}),
    ],
)
def test_what_is_no_night_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        night_from_dict({**json_records.plain(night()), field: value})


def test_the_journal_keeps_measurements_for_one_night(tmp_path: Path) -> None:
    journal = Journal(tmp_path, NOW)
    journal.begin("a", searches=True)
    journal.begin("b", searches=False)
    journal.keep("a", CONFIG, HERE, [1.0, 2.0])
    later = Journal(tmp_path, NOW + datetime.timedelta(hours=3))
    assert later.begun == {"a": 1}
    assert later.speeds("a", CONFIG, HERE) == [1.0, 2.0]
    assert later.speeds("a", CONFIG, T4) == []
    assert later.speeds("b", CONFIG, HERE) == []
    for hours in (12, -12, 12.01, -12.01):  # by a clock that was set
        when = NOW + datetime.timedelta(hours=hours)
        kept = [1.0, 2.0] if abs(hours) == 12 else []
        assert Journal(tmp_path, when).speeds("a", CONFIG, HERE) == kept
    later.begin("a", searches=True)
    assert Journal(tmp_path, NOW).begun == {"a": 2}
    later.pause("a")
    assert Journal(tmp_path, NOW).begun == {"a": 0}
    later.end("a")
    assert Journal(tmp_path, NOW).begun == {}


def test_what_an_older_night_left_is_no_part_of_tonights(tmp_path: Path) -> None:
    Journal(tmp_path, NOW - datetime.timedelta(days=1)).keep("a", CONFIG, HERE, [1.0, 2.0])
    Journal(tmp_path, NOW).keep("a", CONFIG, HERE, [3.0])
    later = Journal(tmp_path, NOW + datetime.timedelta(hours=1))
    assert later.speeds("a", CONFIG, HERE) == [3.0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"begun": 3}', '{"begun": {"a": 1}}', "\x00"])
def test_a_damaged_journal_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "nightly.json").write_text(content, encoding="utf-8")
    journal = Journal(tmp_path, NOW)
    assert journal.begun == {}
    assert journal.speeds("a", CONFIG, HERE) == []
    journal.begin("a", searches=True)
    assert Journal(tmp_path, NOW).begun == {"a": 1}


@pytest.mark.worker
def test_the_lock_is_let_go_when_its_holder_is_killed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from autotune.nightly.journal import locked\n"
        f"with locked({url!r}, Path('x')):\n print('held', flush=True)\n time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(StorageError, match="Another autotune nightly"), locked(url, tmp_path):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with locked(url, tmp_path):
        pass


@pytest.mark.worker
def test_a_plan_says_a_reason_once_where_several_cells_cannot_begin_for_it() -> None:
    said = ("no budget", "no budget", "", "no budget", "no model")
    cells = tuple(planned(f"c{n}", problem=problem) for n, problem in enumerate(said))
    prepared = Prepared(backend="cpu", fingerprint=HERE, planned=cells)
    lines = draw.plan_text(prepared, 3600.0, 0).splitlines()[1:]
    reasons = [line.strip() for line in lines if not line.startswith("  new")]
    assert reasons == ["no budget", "For the same reason.", "no budget", "no model"]


def test_a_dry_run_says_why_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fingerprints, "assumed_fingerprint", lambda backend: HERE)
    text = "models: [gpt2, gpt2-huge, who/knows]\nbudgets: [2GB]"
    Path("matrix.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(["nightly", "matrix.yaml", "--backend", "cpu", "--dry-run", "--max-minutes", "12"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("NVIDIA GeForce RTX 4090: 1 of 3 cells, about 13 min 55 s of 12 min")
    assert lines[1].startswith(
        "  new          gpt2-2gb-seq1024-any  never tuned on this machine: search, about 13 min 55 s"
    )
    assert "gpt2-huge-2gb-seq1024-any  never tuned on this machine: cannot begin" in lines[2]
    assert lines[3].strip().startswith("Unknown model 'gpt2-huge'")
    assert lines[5].strip() == (
        "The configuration of who/knows is not here. It is neither in the catalogue nor in the Hub's "
        "cache, and the Hub was not asked. A search asks the Hub for it."
    )
    assert len(lines) == 6
    Path("matrix.yaml").write_text("models: [gpt2]\nbudgets: [900GB]", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["nightly", "matrix.yaml", "--backend", "cpu", "--dry-run"])
    first, _, too_much = map(str.strip, capsys.readouterr().out.splitlines())
    # What cannot begin takes no time.
    assert first.startswith("NVIDIA GeForce RTX 4090: 0 of 1 cells, about 0 s of")
    assert too_much.startswith("budgets: 900GB is more than half of this machine's memory")
    assert too_much.endswith("Lower budgets.")
    Path("matrix.yaml").write_text(
        "models: [gpt2]\nbudgets: [all, 2GB]\ntask: distillation\n"
        "cells: [{where: {budget: all}, teacher: gpt2}]",
        encoding="utf-8",
    )
    with pytest.raises(SystemExit):
        main(["nightly", "matrix.yaml", "--backend", "cpu", "--dry-run"])
    no_budget, no_teacher = capsys.readouterr().out.splitlines()[2::2]
    assert no_budget.strip().startswith("There is no memory budget")
    assert no_budget.endswith("Give budgets, such as 500MB."), "a list, which one text is not"
    assert no_teacher.strip().startswith("The task distillation needs a teacher")
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.yaml"]


@pytest.mark.worker
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_exits_with_what_the_night_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.yaml").write_text("models: [gpt2]\ntime_budget: 2h", encoding="utf-8")
    asked: list[float] = []

    def found(*_: object, budget_seconds: float, **__: object) -> run.NightReport:
        asked.append(budget_seconds)
        return run.NightReport(
            digest=digest(REGRESSED, notes=("a note",)), files=[Path("digest.md")]
        )

    monkeypatch.setattr(run, "night", found)
    with pytest.raises(SystemExit) as ended:
        main(["nightly", "m.yaml", "--backend", "cpu", *(["--json"] if as_json else [])])
    assert ended.value.code == 7
    assert asked == [7200.0]
    told = capsys.readouterr()
    assert "a note" in told.err
    if as_json:
        content = json.loads(told.out)
        assert (content["exit_code"], content["events"]) == (7, ["regression"])
        assert content["cells"][0]["interval"] == [-0.07, -0.03]
        assert content["files"] == ["digest.md"]
    else:
        assert "slower: regression -5.0 %, 950 tokens/s" in told.out


@pytest.mark.worker
def test_nothing_to_measure_on_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.catalogue.gpus.detect", list)
    Path("m.yaml").write_text("models: [gpt2]", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["nightly", "m.yaml"])
    assert ended.value.code == 3
    assert "There is no CUDA GPU to tune for" in capsys.readouterr().err


def test_a_digest_in_json() -> None:
    made = digest(REGRESSED, left=(planned("later"),), elapsed_seconds=605.04, notes=("a note",))
    found = made.to_dict()
    assert (found.pop("cells"), found.pop("left")) == (
        [REGRESSED.to_dict()],
        [planned("later").to_dict()],
    )
    assert found == {
        "schema_version": 1,
        "made_at": "2026-03-01T02:17:00+00:00",
        "machine": "rtx-4090",
        "device": "NVIDIA GeForce RTX 4090",
        "driver": "580.10",
        "cuda": "13.0",
        "versions": {"peft": "0.21", "torch": "2.13.0", "transformers": "5.23"},
        "headline": "1 cell: 1 regression",
        "events": ["regression"],
        "exit_code": 7,
        "interrupted": False,
        "elapsed_seconds": 605.0,
        "notes": ["a note"],
    }


def test_a_cell_of_a_digest_is_a_row_with_its_figures() -> None:
    """(952 - 948) / 2^0.5 is 0.3 % of their mean; 1,008 GB/s are 0.30 of the 3,350 of an H100."""
    alone = Done(
        planned=planned("alone"),
        night=night(0.0, (1236.0,), peak_device_bytes=3 * 2**29),
        relative=night(0.0, (618.0,), fingerprint=H100),
    )
    unknown = Done(planned=planned("unknown"), night=night(0.0, (5.0,), peak_device_bytes=None))
    shown = draw.markdown(digest(REGRESSED, alone, unknown))
    rows = [line for line in shown.splitlines() if line.startswith("| ") and " cell " not in line]
    config = (
        "LoRA r=16 on all-linear, bf16-autocast, adamw\\_torch\\_fused, micro-batch 2 x 16, sdpa"
    )
    new = "(new: never tuned on this machine) |"
    assert rows == [
        "| slower | **regression** | 950 | -5.0 % | -7.0 % to -3.0 % | 8.00 GiB "
        f"| on 2 nights; since driver 580.10 -> 590.2 {new}",
        f"| alone | **new** | 1,236 |  |  | 1.50 GiB | first answer {new}",
        f"| unknown | **new** | 5 |  |  |  | first answer {new}",
        f"| slower | {config} | 2 | 1,000 950 950 |",
        f"| alone | {config} | 1 | 1,236 |",
        f"| unknown | {config} | 1 | 5 |",
        "| alone | 1,236 | NVIDIA H100 80GB HBM3 | 618 | 2.00 x | 0.30 x |",
    ]
    assert [draw.done_line(each) for each in (alone, REGRESSED)] == [
        "alone: new, 1,236 tokens/s (1 process); first answer",
        "slower: regression -5.0 %, 950 tokens/s +- 0.3 % (2 processes); "
        "on 2 nights; since driver 580.10 -> 590.2",
    ]
