"""`autotune max`: what is typed, what is said, and that `estimate` says the same of the answer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import answers
import pytest

from autotune import cli
from autotune.cli import maximum
from autotune.report import limits
from autotune.search.inverse import questions
from autotune.space.headroom import USUAL_HEADROOM

pytestmark = pytest.mark.usefixtures("forked_workers")

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-llama.json")
ASK = ("max", "--gpu", "rtx-4070", "--gpu-mem", "1GB")

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    monkeypatch.setattr("autotune.catalogue.gpus.detect", list)

    def invoke(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        return int(ended.value.code or 0), *capsys.readouterr()

    return invoke


def test_the_questions_are_those_of_the_search() -> None:
    assert tuple(questions.QUESTIONS) == maximum.WHATS


def test_estimate_says_the_same_of_the_answer(main: Main) -> None:
    code, out, err = main(
        *(*ASK, "--what", "micro-batch", "--model", TINY, "--seq-len", "256"),
        *("--method", "lora", "--checkpointing", "none", "--rank", "8", "--json"),
    )
    assert code == 0, err
    answer: dict[str, Any] = json.loads(out)
    assert answer["evidence"] == "predicted"
    assert answer["value"] == answer["best"]["config"]["micro_batch_size"] > 8
    assert answer["best"]["config"]["activation_checkpointing"] == 0
    assert answer["beyond"]["value"] == answer["value"] + 1
    assert answer["beyond"]["lacks_bytes"] > 0
    assert answer["fixed"] == {"activation_checkpointing": 0, "lora_rank": 8}

    autotune, *arguments = shlex.split(answer["check"])
    assert autotune == "autotune"
    assert arguments[arguments.index("--gpu-mem") + 1] == "1GB"
    code, out, err = main(*arguments, "--json")
    assert code == 0, err
    checked = json.loads(out)
    assert checked["fits"]
    assert checked["leaves_room"]
    sold = SimpleNamespace(
        best=answers.estimate(),
        memory_budget_bytes=12 * 2**30,
        card_is_here=False,
        headroom=USUAL_HEADROOM,
        host_memory_bytes=None,
        model=TINY,
        task="causal-lm",
        dataset_options={},
    )
    # An RTX 4070 is sold with 12 GiB and has less: with both named `estimate` refuses.
    again = limits.command(cast("questions.Limit", sold))
    assert "--gpu-mem 12884901888B" in again
    assert "--gpu rtx-4070" not in again
    roomy: dict[str, Any] = json.loads(main(*arguments, "--headroom", "900MB", "--json")[1])
    assert (roomy["fits"], roomy["leaves_room"]) == (True, False)
    assert {name: answer["best"][name] for name in checked if name in answer["best"]} == {
        name: value for name, value in checked.items() if name in answer["best"]
    }


def test_a_next_value_that_fits_when_it_is_replayed_whole_lacks_nothing() -> None:
    smallest = answers.estimate()
    budget_bytes = smallest.resident_bytes + 10**9
    beyond = questions.Beyond(
        value=9, smallest=smallest, budget_bytes=budget_bytes, needed_bytes=budget_bytes - 1
    )
    limit = SimpleNamespace(
        beyond=beyond,
        what="micro-batch",
        headroom=None,
        memory_budget_bytes=budget_bytes,
        host_memory_bytes=None,
    )
    said = limits._next(cast("questions.Limit", limit))
    assert said.startswith("micro-batch 9 may fit, too: replayed whole it needs a budget of")
    assert "more than" not in said


def test_the_answer_is_drawn_first_and_all_of_it_is_predicted(main: Main) -> None:
    code, out, err = main(
        *(*ASK, "--what", "sequence-length", "--model", TINY, "--method", "full"),
        *("--multiple-of", "32", "--checkpointing", "full", "--no-offload"),
    )
    assert code == 0, err
    said = " ".join(out.split())  # where a line breaks depends on how long the model's path is
    head, answer, _ = said.partition(
        " answer 256 tokens: the longest sequence that fits, in steps of"
    )
    assert answer
    assert "PREDICTED, not measured" in head
    assert "Memory is not the limit: the model's configuration has positions for no more." in said
    assert "check autotune estimate --model" in said
    assert "checkpoint every layer" in said


def test_nothing_fits_is_exit_code_4(main: Main) -> None:
    code, _, err = main(
        *("max", "--gpu", "rtx-4070", "--gpu-mem", "280MB", "--what", "lora-rank"),
        *("--model", TINY, "--seq-len", "64", "--method", "lora", "--micro-batch", "1"),
    )
    assert code == 4
    assert "Nothing fits" in err
    assert "is predicted to need" in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--what", "sequence-length", "--model", TINY, "--seq-len", "8"), "--seq-len does not go"),
        (("--what", "micro-batch", "--model", TINY, "--micro-batch", "8"), "--micro-batch does not"),
        (("--what", "lora-rank", "--model", TINY, "--rank", "8"), "--rank does not go"),
        (("--what", "model", "--model", TINY), "--model does not go"),
        (("--what", "gpu", "--model", TINY), "--gpu does not go"),
        (("--what", "micro-batch"), "needs a model"),
        (("--what", "micro-batch", "--model", TINY, "--accumulation", "100000"), "is more than `max` tries"),
        (("--what", "lora-rank", "--model", TINY, "--method", "full"), "has no rank"),
        (("--what", "sequence-length", "--model", TINY, "--multiple-of", "512"), "No multiple of 512"),
        (("--what", "model", "--seq-len", "999", "--task", "automatic-speech-recognition"), "No model of"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line_and_exit_code_2(
    main: Main, arguments: tuple[str, ...], part: str
) -> None:
    code, out, err = main(*ASK, *arguments)
    assert code == 2
    assert not out
    assert part in err
    assert len(err.strip().splitlines()) == 1
