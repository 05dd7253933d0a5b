"""An answer read back is the answer: through JSON, and through the database."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import answers
import pytest

from autotune.errors import ConfigError, StorageError
from autotune.records.answer import Change, Tip, answer_from_dict, stored_record
from autotune.records.estimate import PerGpu
from autotune.records.loader_times import LoaderTime, LoaderTimes
from autotune.space.lengths import Lengths
from autotune.space.requirements import LeftOut, Reason
from autotune.store import stored_answers
from autotune.store.optuna_study import existing_study, open_study

LENGTHS = Lengths(
    num_samples=3, num_tokens=60, num_kept_tokens=50, percentiles=tuple(range(10, 111))
)
PER_GPU = PerGpu(
    num_gpus=2,
    parallelism="ddp",
    parameters_bytes=1,
    gradients_bytes=2,
    optimizer_state_bytes=3,
    gathered_bytes=4,
    buffers_bytes=5,
    host_bytes=6,
    sent_bytes_per_step=7,
    communication_seconds=0.5,
)
CASES: dict[str, dict[str, Any]] = {
    "predicted": {},
    "nothing else": {"tied": (), "changes": (), "more_memory": None, "baseline": None},
    "dataset": {"workload": dataclasses.replace(answers.WORKLOAD, lengths=LENGTHS)},
    "extra arguments": {
        "workload": dataclasses.replace(
            answers.WORKLOAD, extra_arguments='{"seed": 7, "learning_rate": 0.001}'
        )
    },
    "tip, further and safer": {
        "tip": Tip.LIGER,
        "further": answers.estimate(answers.ADAPTER),
        "safer": answers.answer().changes[0],
    },
    "classes that the space has not": {"classes_outside": ("exact", "numerics")},
    "several GPUs": {
        "workload": dataclasses.replace(answers.WORKLOAD, num_gpus=2),
        "best": answers.estimate(per_gpu=PER_GPU),
        "left_out": (LeftOut("galore", Reason.NOT_INSTALLED, "needs: pip install galore-torch"),),
    },
    "unknown speed": {"tied": (answers.estimate(step_seconds=None),)},
    "measured with torch.compile": {
        "measured": answers.measured(
            train_steps=100,
            eager=answers.measurement(cold_start_seconds=0.5),
            compiled=answers.measurement(step_seconds=1.0, cold_start_seconds=30.0),
            num_compiled=2,
        ),
    },
    "loader": {
        "measured": answers.measured(),
        "loader": LoaderTimes(
            micro_step_seconds=0.5,
            times=(
                LoaderTime(
                    num_workers=2,
                    prefetch_factor=4,
                    pin_memory=True,
                    batch_seconds=0.25,
                    num_batches=60,
                ),
            ),
        ),
    },
    "measured, stopped as too slow": {
        "measured": answers.measured(
            best=answers.measurement(outcome="slow", message="stopped after 4 steps"),
            confirmation=answers.measurement(confirm_steps=50),
        ),
    },
    "measured": {
        "measured": answers.measured(
            confirmation=answers.measurement(confirm_steps=50),
            rejected=(answers.measurement(outcome="oom", micro_step_seconds=None),),
        ),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_read_back_is_equal(name: str) -> None:
    answer = answers.answer(**CASES[name])
    text = json.dumps(stored_record(answer), allow_nan=False)
    assert answer_from_dict(json.loads(text)) == answer


def test_a_winner_that_was_stopped_and_then_confirmed_fits() -> None:
    stopped = answers.measurement(outcome="slow", message="stopped after 4 steps")
    confirmed = answers.measurement(confirm_steps=50)
    told: Any = answers.measured(best=stopped, confirmation=confirmed).to_dict()
    assert told["confirmed"] is True
    assert (told["best"]["fits"], told["best"]["problem"]) == (True, "")
    assert told["best"]["outcome"] == "slow"
    full = answers.measurement(outcome="full_disk", message="no room", confirm_steps=50)
    told = answers.measured(best=stopped, confirmation=full).to_dict()
    assert (told["confirmed"], told["best"]["fits"]) == (False, False)


def test_more_memory_is_compared_with_that_memory() -> None:
    size = answers.answer().workload.memory_budget_bytes + 10**9
    bigger = answers.estimate(device_gib=(size - 10**8) / 2**30)
    more = Change(setting="memory_budget_bytes", value=size, estimate=bigger, leaves_room=True)
    told: Any = answers.answer(more_memory=more).to_dict()["changes"]
    assert told[-1]["setting"] == "memory_budget_bytes"
    assert (told[-1]["fits"], told[-1]["leaves_room"]) == (True, True)
    assert told[-1]["memory_budget_bytes"] == size
    assert told[-1]["headroom_bytes"] == pytest.approx(10**8, abs=10)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("best", "config", "micro_batch_size"), "4", "best.config.micro_batch_size: Expected int"),
        (("best", "breakdown"), None, "best.breakdown: Expected object, got null"),
        (("workload", "methods"), ["magic"], "workload: methods is ('magic',)"),
        (("elapsed_seconds",), float("nan"), "elapsed_seconds is nan"),
        (("tied",), {}, "tied: Expected array, got object"),
        (("schema_version",), 2, "schema_version is 2"),
        (("surprise",), 1, "surprise is unknown"),
        (("changes", 0, "setting"), "&ptimizer", "changes[0]: '&ptimizer' is no setting"),
    ],
)
def test_garbage_is_named(place: tuple[Any, ...], value: object, said: str) -> None:
    values: Any = stored_record(answers.answer())
    inner = values
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match="this is no answer of autotune") as caught:
        answer_from_dict(values)
    assert said in str(caught.value)


def test_a_study_keeps_its_answer(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    answer = answers.answer()
    with pytest.raises(StorageError, match="There is no database"):
        stored_answers.load(url, "one")
    assert not list(tmp_path.iterdir())
    with open_study(
        url, "one", workload=answers.WORKLOAD, gpu=answer.gpu, command="autotune find --model X"
    ) as study:
        pass
    with pytest.raises(ConfigError, match=r"holds no answer.*autotune find --model X"):
        stored_answers.load(url, "one")
    with existing_study(url, "one") as study:
        study.set_user_attr(stored_answers.RESULT, stored_record(answer))
    stored = stored_answers.load(url, "one")
    assert stored.answer == answer
    assert stored.command == "autotune find --model X"
    with pytest.raises(ConfigError, match=r'There is no study.*Did you mean "one"'):
        stored_answers.load(url, "onee")
    with existing_study(url, "one") as study:
        study.set_user_attr(stored_answers.RESULT, {"schema_version": 1})
    with pytest.raises(StorageError, match="cannot be read"):
        stored_answers.load(url, "one")
