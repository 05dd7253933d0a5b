"""A report's record, its Markdown and its HTML, as text; test_report_page.py opens the HTML in a browser."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import time
from pathlib import Path
from typing import Any

import answers
import optuna
import pytest
from click.testing import CliRunner

from autotune.cli import cli
from autotune.cli.report import FORMATS
from autotune.common import json_records
from autotune.common.units import GIB
from autotune.errors import ConfigError, StorageError
from autotune.probe.tell_optuna import tell
from autotune.records.answer import Answer, stored_record
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.report import data, facts, files, markdown, words
from autotune.report import html as page
from autotune.report.data import ReportData
from autotune.space.config import TrainConfig
from autotune.space.requirements import LeftOut, Reason
from autotune.space.teacher import Teacher
from autotune.space.words import describe, words_of_plan
from autotune.store import optuna_study, predicted_trials, stored_answers

HOSTILE = (
    "</script><script>window.hacked = 1</script><!--",
    "\"'><img src=x onerror=window.hacked=1>",
    "two\nlines\r\n\u2028and\ttabs\x00\x1b[31m",
    "{{ 7 * 7 }} {% raw %} ${7*7}",
    "| a | b |\n# heading [link](javascript:alert(1)) `code`",
    "<!--" + "long" * 2500,
)


BASE = dataclasses.replace(answers.BASE, gradient_accumulation_steps=32)
"""Of the answer's effective batch size."""


def in_memory() -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize")


def stored_of(**changed: Any) -> stored_answers.StoredAnswer:
    """A stored answer around answers.answer, whose fields may be named here."""
    fields = {field.name for field in dataclasses.fields(stored_answers.StoredAnswer)}
    own = {name: value for name, value in changed.items() if name in fields}
    answer = answer_of(**{n: v for n, v in changed.items() if n not in fields})
    values: dict[str, Any] = {
        "study": "qwen-12gb",
        "answer": answer,
        "files": (),
        "command": "autotune find --model Qwen/Qwen2.5-1.5B --gpu-mem 12GB",
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "details": answers.details(),
    }
    return stored_answers.StoredAnswer(**values | own)


def answer_of(**changed: Any) -> Answer:
    baseline = answers.estimate(BASE, device_gib=11.0, step_seconds=16.0)
    return answers.answer(**{"base": BASE, "baseline": baseline} | changed)


def predicted(*estimates: Estimate, **changed: Any) -> ReportData:
    study = in_memory()
    predicted_trials.record_estimates(study, estimates, budget_bytes=answers.BUDGET_BYTES)
    return data.collect(stored_of(**changed), study.get_trials(deepcopy=False))


def measured(*measurements: Measurement, **changed: Any) -> ReportData:
    study = in_memory()
    for each in measurements:
        tell(study, study.ask(), each, answers.estimate(each.config))
    found = stored_of(measured=answers.measured(), **changed)
    return data.collect(found, study.get_trials(deepcopy=False))


def config(**changed: Any) -> TrainConfig:
    return dataclasses.replace(answers.CONFIG, **changed)


def test_predicted_trials_fit_or_do_not_and_say_by_how_much() -> None:
    record = predicted(
        answers.estimate(),
        answers.estimate(BASE, device_gib=12.18, step_seconds=4.0),
        answers.estimate(config(micro_batch_size=2), device_gib=10.5, paged_in_bytes=2 * GIB),
    )
    fits, too_large, paged = record.trials
    # Paged state that finds room is no need, here as in the table of classes.
    assert (paged.resident_bytes, paged.is_frontier) == (8.5 * GIB, True)
    table = markdown.draw(record).partition("## Trials")[2]
    assert " 8.50 " in table
    assert " 10.50 " not in table
    assert (fits.outcome, fits.reason, fits.evidence, fits.is_answer) == (
        "fits",
        "",
        "predicted",
        True,
    )
    assert fits.tokens_per_second == 32 * 1024 / 8.0
    assert fits.tradeoff == "numerics"
    # 12.18 GiB - 12 x 10^9 B = 1.004 GiB.
    assert (too_large.outcome, too_large.reason) == ("does not fit", "1.00 GiB over the budget")
    assert not too_large.is_answer
    assert too_large.tradeoff == "exact"


def test_a_trial_of_another_space_says_so() -> None:
    study, found = in_memory(), stored_of()
    others = [answers.estimate(), answers.estimate(BASE, device_gib=12.18)]
    predicted_trials.record_estimates(
        study, others, budget_bytes=answers.BUDGET_BYTES, space="my <b>space"
    )
    own = [answers.estimate(config(micro_batch_size=2))]
    predicted_trials.record_estimates(
        study, own, budget_bytes=answers.BUDGET_BYTES, space=found.answer.space
    )
    record = data.collect(found, study.get_trials(deepcopy=False))
    # The answer is of its own space, whichever search came upon it first.
    assert [row.space for row in record.trials] == ["", "my <b>space", ""]
    assert record.trials[1].reason == "1.00 GiB over the budget"
    assert "1.00 GiB over the budget; of the space my &lt;b>space" in markdown.draw(record)
    assert "of the space my \\u003cb\\u003espace" in page.draw(record)


def test_the_frontier_is_what_nothing_beats_in_both() -> None:
    made = [(10.0, 8.0), (9.0, 10.0), (9.5, 12.0), (8.0, 16.0), (13.0, 1.0), (8.5, 16.0)]
    record = predicted(
        *(
            answers.estimate(
                config(torch_empty_cache_steps=i), device_gib=device_gib, step_seconds=seconds
            )
            for i, (device_gib, seconds) in enumerate(made)
        )
    )
    # 9.5 GiB is slower than 9.0; 13 GiB do not fit; 8.5 GiB are no faster than 8.0.
    assert [row.number for row in record.trials if row.is_frontier] == [0, 1, 3]


def test_measured_trials_keep_their_outcome_and_what_was_predicted() -> None:
    record = measured(
        answers.measurement(),
        answers.measurement(config=BASE, outcome="oom", message="lacked 2 GiB"),
        answers.measurement(config=config(attention="eager"), num_alloc_retries=3),
    )
    ok, oom, thrashes = record.trials
    assert (ok.evidence, ok.outcome, ok.reason, ok.is_answer) == ("measured", "ok", "", True)
    assert ok.tokens_per_second == 32 * 1024 / 10.0
    assert ok.peak_device_bytes == 10 * GIB
    assert ok.predicted_tokens_per_second == 32 * 1024 / 8.0
    assert ok.predicted_peak_device_bytes == 10 * GIB
    assert ok.is_frontier
    assert (oom.outcome, oom.reason, oom.is_frontier) == ("oom", "lacked 2 GiB", False)
    assert thrashes.reason == "fits only with 3 allocation retries"
    assert not thrashes.is_frontier
    # Beside an answer that is predicted, what was measured of it is no answer.
    study = in_memory()
    tell(study, study.ask(), answers.measurement(), answers.estimate())
    (beside,) = data.collect(stored_of(), study.get_trials(deepcopy=False)).trials
    assert (beside.config, beside.is_answer) == (ok.config, False)


def test_trials_that_cannot_be_read_are_rows_all_the_same() -> None:
    study = in_memory()
    study.ask()
    broken = study.ask()
    broken.set_user_attr("evidence", "predicted")
    broken.set_user_attr("config", {"method": "full"})
    unfinished, unreadable = data.collect(stored_of(), study.get_trials(deepcopy=False)).trials
    assert unfinished.outcome == "not finished"
    assert unreadable.outcome == "unreadable"
    assert "config: Object missing required field micro_batch_size" in unreadable.reason
    assert page.draw(data.collect(stored_of(), study.get_trials(deepcopy=False)))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("tokens_per_second", "5"), ("tokens_per_second", float("nan")), ("peak_device_bytes", 1.5)],
)
def test_a_trial_with_a_figure_of_a_wrong_type_cannot_be_read(name: str, wrong: object) -> None:
    study = in_memory()
    for value in (None, wrong):
        trial = study.ask()
        trial.set_user_attr("evidence", "predicted")
        trial.set_user_attr("config", answers.CONFIG.to_dict())
        trial.set_user_attr("tokens_per_second", 5.0)
        trial.set_user_attr("peak_device_bytes", 5)
        if value is not None:
            trial.set_user_attr(name, value)
    fits, unreadable = data.collect(stored_of(), study.get_trials(deepcopy=False)).trials
    assert fits.outcome == "fits"
    assert unreadable.outcome == "unreadable"
    assert name in unreadable.reason


def test_the_tiles_say_what_is_predicted_and_what_measured() -> None:
    speed, memory, against = facts.tiles(answer_of())
    assert (speed.figure, speed.unit, speed.evidence) == ("4,096", "tokens/s", "predicted")
    assert (memory.figure, memory.unit) == ("10.00", "GiB of 11.18 GiB")
    assert (against.figure, against.evidence) == ("2.00", "predicted")
    assert against.note.startswith("the 2,048 of the Trainer's defaults")
    baseline = answers.measurement(config=BASE, step_seconds=15.0)
    found = answers.measured(baseline=baseline)
    speed, memory, against = facts.tiles(answer_of(measured=found))
    assert (speed.figure, speed.evidence) == ("3,277", "measured")
    # 4,096 predicted over 3,276.8 measured.
    assert "Predicted: 4,096 tokens/s, off by +25 %" in speed.note
    assert (memory.figure, memory.evidence) == ("10.00", "measured")
    assert (against.figure, against.evidence) == ("1.50", "measured")
    # 32,768 tokens in 15 s.
    assert against.note == "the 2,185 tokens/s +- 0.4 % of the Trainer's defaults"


def test_a_base_that_fits_nowhere_or_is_the_answer_has_no_ratio() -> None:
    assert facts.tiles(answer_of(baseline=None))[2].figure == "does not fit"
    same = facts.tiles(answer_of(baseline=answers.estimate()))[2]
    assert (same.figure, same.evidence) == ("the same", "")
    crashed = answers.measured(baseline=answers.measurement(config=BASE, outcome="crashed"))
    assert facts.tiles(answer_of(measured=crashed))[2].figure == "did not run"


def test_a_setting_with_commas_in_it_is_one_part() -> None:
    adapter = config(method="peft", peft='{"peft_type": "VERA", "r": 8, "d_initial": 0.1}')
    parts = facts.config_parts(adapter)
    assert parts[0].endswith("VERA (r=8, d_initial=0.1)")
    assert ", ".join(parts) == describe(adapter)


def test_the_size_of_a_model_leaves_its_adapter_out() -> None:
    """1.55 billion with the adapter's 50 million, 1.5 without."""
    assert words.model_size(answer_of().best) == "1.50 B parameters"
    adapted = answers.estimate(answers.ADAPTER)
    assert adapted.parameters.total == 1_550_000_000
    assert words.model_size(answer_of(best=adapted).best) == "1.50 B parameters"


def test_the_parts_of_a_bar_add_up_to_its_total() -> None:
    bars = facts.bars(predicted())
    assert [bar.label for bar in bars] == ["The answer", "The Trainer's defaults"]
    for bar in bars:
        assert sum(size for _, size in bar.parts) == bar.total_bytes
    # A base that fits nowhere is drawn from the instant of its peak.
    details = answers.details(base=answers.details().answer)
    base = facts.bars(predicted(baseline=None, details=details))[1]
    assert base.total_bytes == 11 * GIB
    assert sum(size for _, size in base.parts) == 11 * GIB
    assert dict(base.parts)["activations"] == 2 * GIB


def test_a_base_of_which_nothing_is_known_has_no_bar() -> None:
    for details in (None, answers.details(base=None)):
        (only,) = facts.bars(predicted(baseline=None, details=details))
        assert only.label == "The answer"


def test_the_way_to_the_answer_in_words() -> None:
    start, optimizer, batch = facts.path_rows(predicted())
    assert (start.change, start.gain, start.saving) == ("the Trainer's defaults", "", "")
    assert (optimizer.change, optimizer.gain, optimizer.saving) == (
        "adamw_bnb_8bit",
        "-2 %",
        "-3.00 GiB",
    )
    assert (batch.change, batch.gain) == ("micro-batch 4 x 8", "+105 %")
    last = dataclasses.replace(answers.details().path[-1], all_host_bytes=2)
    details = dataclasses.replace(answers.details(), path=(last,))
    for limit_bytes, fits in ((None, True), (2, True), (1, False)):
        limited = dataclasses.replace(answers.WORKLOAD, host_memory_bytes=limit_bytes)
        assert facts.path_rows(predicted(details=details, workload=limited))[0].fits is fits
    for more_bytes, fits in ((0, True), (-1, False)):
        budget_bytes = last.resident_bytes + more_bytes
        limited = dataclasses.replace(answers.WORKLOAD, memory_budget_bytes=budget_bytes)
        assert facts.path_rows(predicted(details=details, workload=limited))[0].fits is fits


def test_a_plan_of_checkpointing_is_one_setting_in_words() -> None:
    planned = config(activation_checkpointing=1, checkpoint_plan="products", checkpoint_layers=14)
    said = "checkpoint the first 14 layers, products kept"
    rows = facts.settings(answer_of(best=answers.estimate(planned), baseline=None))
    assert [row for row in rows if "checkpoint" in row[0]] == [
        ("activation checkpointing", words_of_plan(BASE), said)
    ]
    first = answers.details().path[0]
    step = dataclasses.replace(
        answers.details().path[-1],
        # Paged state that finds room is no need of the configuration: the table of classes has none either.
        peak_device_bytes=first.peak_device_bytes + 3 * GIB,
        paged_in_bytes=2 * GIB,
        changed={
            "activation_checkpointing": 1,
            "checkpoint_plan": "products",
            "checkpoint_layers": 14,
        },
    )
    details = dataclasses.replace(answers.details(), path=(first, step))
    row = facts.path_rows(predicted(details=details))[1]
    assert (row.change, row.saving) == (said, "+1.00 GiB")


def test_where_figures_come_from_is_said_row_by_row() -> None:
    plain = dict(facts.provenance(predicted()))
    assert [*plain] == [
        *("command", "study", "model", "card", "budget", "workload", "space", "libraries"),
        "not modelled",
    ]
    assert plain["card"] == "NVIDIA RTX 4070, named"
    # 18,432 less 7,228 that no rule lets through.
    assert plain["space"] == (
        "default: 18,432 points, 11,204 valid, 3,871 may fit, 40 replayed in full, in 4.20 s"
    )
    assert plain["libraries"] == "torch 2.13.0, transformers 5.23.0"
    counts = dataclasses.replace(answers.answer().counts, passed_over=1200)
    found = facts.provenance(
        predicted(
            counts=counts,
            command="",
            versions={},
            space_changes=("one", "two"),
            workload=dataclasses.replace(
                answers.WORKLOAD, teacher=Teacher(name="large", config_json="{}")
            ),
        )
    )
    more = dict(found)
    assert "11,204 valid, 1,200 slower than what fits with less saving of memory" in more["space"]
    assert (more["command"], more["libraries"]) == ("not known", "not known")
    assert [text for label, text in found if label == "space changed"] == ["one", "two"]
    assert more["teacher"] == "large"


def test_where_measured_figures_come_from_is_said_too() -> None:
    best = answers.measurement()
    seen = dataclasses.replace(best.fingerprint, versions=(("peft", "0.21"), ("torch", "2.13")))
    found = answers.measured(best=dataclasses.replace(best, fingerprint=seen))
    rows = dict(facts.provenance(predicted(measured=found)))
    assert rows["measured on"] == seen.device
    assert rows["driver"] == f"{seen.driver}, CUDA {seen.cuda}"
    assert rows["libraries"] == "peft 0.21, torch 2.13"
    assert "allocator" not in rows
    assert "limits" not in rows
    on_cpu = dataclasses.replace(
        best,
        spec=dataclasses.replace(best.spec, backend="cpu"),
        fingerprint=dataclasses.replace(seen, driver="", allocator="set"),
    )
    rows = dict(facts.provenance(predicted(measured=answers.measured(best=on_cpu))))
    assert rows["limits"].startswith("Measured on a CPU")
    assert "driver" not in rows
    assert rows["allocator"] == "set"


def test_reasons_are_of_what_was_found() -> None:
    """What was measured is not predicted once more."""
    of_prediction = facts.reasons(answer_of())
    assert of_prediction[0] == words.why(answer_of())
    starts = {text.partition(":")[0] for text in of_prediction}
    assert {"Tied", "Learning rate"} <= starts
    assert not {"Probes", "The run", "The loader", "Plan B, predicted"} & starts
    failed = answers.measurement(config=answers.ADAPTER, confirm_steps=50, outcome="oom")
    measured = answer_of(
        measured=answers.measured(rejected=(failed,)),
        tied=(),
        fallbacks=(answers.estimate(BASE),),
    )
    starts = {text.partition(":")[0] for text in facts.reasons(measured)}
    assert {"Probes", "Rejected", "The run", "The loader", "Plan B, predicted"} <= starts
    assert "Tied" not in starts


class Page(html.parser.HTMLParser):
    """What a parser makes of a page: its elements, and its text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] not in ("script", "style"):
            self.words.append(data)

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]


def hostile(text: str) -> ReportData:
    """The same report, this text wherever a user may write."""
    workload = dataclasses.replace(answers.WORKLOAD, model=text)
    lent = config(method="lora", lora_rank=8, lora_targets=text)
    found = stored_of(
        study=text,
        command=f"autotune find --model {text}",
        workload=workload,
        gpu=text,
        gpu_reason=text,
        space=text,
        left_out=(LeftOut(text, Reason.NOT_PREDICTED, text),),
        space_changes=(text,),
        versions={text: text},
        best=answers.estimate(lent),
        best_by_class={"recipe": answers.estimate(lent)},
        measured=answers.measured(
            best=answers.measurement(config=lent, message=text),
            rejected=(answers.measurement(config=lent, outcome="crashed", message=text),),
        ),
    )
    study = in_memory()
    failed = answers.measurement(config=lent, outcome="crashed", message=text)
    tell(study, study.ask(), failed, answers.estimate(lent))
    return data.collect(found, study.get_trials(deepcopy=False))


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_names_are_text_and_nothing_else(text: str) -> None:
    harmless = Page(page.draw(hostile("harmless")))
    drawn = page.draw(hostile(text))
    parsed = Page(drawn)
    # Not one element or attribute more; a comma makes two settings of one.
    assert sorted(set(parsed.tags())) == sorted(set(harmless.tags()))
    assert parsed.tags().count("script") == 3
    assert "onerror" not in {name for _, attributes in parsed.elements for name in attributes}
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', drawn)
    assert "<" not in embedded
    assert json.loads(embedded)["trials"]["outcome"]["texts"] == ["crashed"]
    assert "\x1b" not in drawn
    assert "\x00" not in drawn


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_names_break_no_markdown(text: str) -> None:
    drawn, harmless = markdown.draw(hostile(text)), markdown.draw(hostile("harmless"))
    headings = re.compile(r"^#.*", re.MULTILINE)
    assert headings.findall(drawn)[1:] == headings.findall(harmless)[1:]
    assert "<" not in drawn
    # As many cells in each row of a table as in its first.
    for table in drawn.split("\n\n"):
        if table.startswith("| "):
            bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(bars) == 1


def test_markdown_has_the_answer_and_the_trials() -> None:
    drawn = markdown.draw(predicted(answers.estimate()))
    lines = drawn.splitlines()
    assert lines[0] == "# Qwen/Qwen2.5-1.5B"
    assert lines[2].startswith(
        "**Predicted, nothing was run.** The fastest configuration that fits"
    )
    assert "| Speed | **4,096** tokens/s | predicted |" in drawn
    assert "| micro-batch 4 x 8 | 4,096 | +105 % | 10.00 GiB | +2.00 GiB |  |" in drawn
    assert "| 0 | fits | predicted | numerics | 4,096 | 10.00 |" in drawn


def test_a_column_of_figures_has_its_unit() -> None:
    drawn = page.draw(predicted(answers.estimate()))
    assert 'data-sort="memory">GiB</button>' in drawn
    assert '"unit":"GiB"' in drawn
    pictures = answers.estimate(config(sequence_length=1))
    record = predicted(pictures, best=pictures)
    for drawn in (page.draw(record), markdown.draw(record)):
        assert "samples/s" in drawn
        assert "tokens/s" not in drawn.replace("page.js", "")


def test_a_base_that_does_not_fit_has_its_micro_batch() -> None:
    base = dataclasses.replace(BASE, micro_batch_size=4)
    details = answers.details()
    drawn = dataclasses.replace(details, base=details.answer)
    bar = facts.bars(predicted(base=base, baseline=None, details=drawn))[1]
    assert bar.config == "full, bf16-true, adamw_torch_fused, micro-batch 4"


def test_the_page_needs_nothing_else_and_lets_nothing_else_run() -> None:
    parsed = Page(page.draw(predicted(answers.estimate())))
    assert not {"link", "img", "iframe", "object", "base"} & set(parsed.tags())
    assert not any("src" in attributes or "href" in attributes for _, attributes in parsed.elements)
    (policy,) = [
        attributes["content"]
        for tag, attributes in parsed.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert policy.count("sha256-") == 2


def test_what_an_older_answer_lacks_is_said() -> None:
    drawn = page.draw(predicted(details=None))
    assert "Not kept by the autotune that made this answer." in drawn
    assert "or an older autotune made this answer" in drawn


def test_five_thousand_trials_are_drawn_in_time_and_size() -> None:
    study = in_memory()
    trial = optuna.trial.create_trial
    for number in range(5000):
        seconds, device_gib = 2 + number % 997 / 50, 6 + number % 89 / 10
        estimate = answers.estimate(
            config(micro_batch_size=number + 1), device_gib=device_gib, step_seconds=seconds
        )
        attributes = {
            "evidence": "predicted",
            "config": estimate.config.to_dict(),
            "tokens_per_second": estimate.tokens_per_second,
            "peak_device_bytes": estimate.peak_device_bytes,
        }
        study.add_trial(trial(value=1.0, user_attrs=attributes))
    trials = study.get_trials(deepcopy=False)
    started = time.process_time()
    drawn = page.draw(data.collect(stored_of(), trials))
    assert time.process_time() - started < 5
    assert len(drawn.encode()) < 6_000_000


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A database with one study that holds an answer."""
    url = f"sqlite:///{tmp_path}/studies.db"
    found = stored_of()
    with optuna_study.open_study(
        url, "qwen-12gb", workload=answers.WORKLOAD, gpu="g", command=found.command
    ) as study:
        predicted_trials.record_estimates(
            study, [answers.estimate()], budget_bytes=answers.BUDGET_BYTES
        )
        study.set_user_attr(stored_answers.RESULT, stored_record(found.answer))
        study.set_user_attr(stored_answers.DETAILS, json_records.plain(answers.details()))
    return url


def test_trials_are_read_as_optuna_reads_them(stored: str) -> None:
    with optuna_study.existing_study(stored, "qwen-12gb") as study:
        study.ask()  # without any attribute
        for _ in range(12):
            tell(study, study.ask(), answers.measurement(), answers.estimate())
        told = [(trial.number, trial.user_attrs) for trial in study.trials]
    with optuna_study.open_study(stored, "other", workload=answers.WORKLOAD, gpu="g") as other:
        other.ask().set_user_attr("evidence", "another study's")
    _, trials = stored_answers.load_with_trials(stored, "qwen-12gb")
    assert len(told) == 14
    assert [(trial.number, trial.user_attrs) for trial in trials] == told


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_command_writes_each_format(format_name: str, stored: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "the report"
    arguments = ["report", "qwen-12gb", "--storage", stored, "--format", format_name]
    ran = CliRunner().invoke(cli, [*arguments, "--out", str(out)], catch_exceptions=False)
    assert ran.exit_code == 0
    assert ran.output.startswith(f"written {out} (")
    written = out.read_text(encoding="utf-8")
    assert "Qwen2.5-1.5B" in written
    assert [path.name for path in out.parent.iterdir()] == ["the report"]
    if format_name != "html":
        ran = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert ran.output == written


def test_json_is_the_whole_record(stored: str) -> None:
    arguments = ["report", "qwen-12gb", "--storage", stored, "--format", "json"]
    record = json.loads(CliRunner().invoke(cli, arguments, catch_exceptions=False).output)
    assert set(record) == {"study", "command", "versions", "result", "details", "trials"}
    assert record["trials"][0]["tokens_per_second"] == 4096.0
    assert record["result"]["best"]["tokens_per_second"] == 4096.0
    assert record["details"] == json.loads(json.dumps(json_records.plain(answers.details())))


def test_a_study_that_is_not_there_or_holds_no_answer_is_refused(
    stored: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no study"):
        data.read(stored, "qwen-12")
    with optuna_study.open_study(stored, "empty", workload=answers.WORKLOAD, gpu="g"):
        pass
    with pytest.raises(ConfigError, match="holds no answer"):
        data.read(stored, "empty")
    with pytest.raises(StorageError, match="no database"):
        data.read(f"sqlite:///{tmp_path}/other.db", "empty")


def test_a_place_that_cannot_be_written_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match=r"report cannot be written.*--out"):
        files.write(tmp_path / "folder", "text")
    with pytest.raises(StorageError, match="cannot be written"):
        files.write(tmp_path / "nul\x00", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
