"""A search over cards that sleep and answer from the recorded sweep (studies/cpu-sweep).

`python -P tests/support/stand_in_cards.py ADDRESS DATABASE` searches on three of a Ray cluster, for those who
kill it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import answers
import sweep
from stand_in_actor import COMPANY, HERE, SECONDS, GpuActor, StandInActor, company

from autotune.catalogue.models import resolve
from autotune.probe.fleet import on_ray
from autotune.probe.fleet.fleet import Fleet
from autotune.probe.fleet.ray_cards import RayCards
from autotune.probe.loop import Plan, search
from autotune.probe.run_one import Prober
from autotune.records.answer import Measured
from autotune.records.estimate import Estimate
from autotune.space.config import TrainConfig, Workload
from autotune.store.optuna_study import open_study
from autotune.store.probe_table import open_probes

__all__ = ["COMPANY", "HERE", "SECONDS", "GpuActor", "cards_of", "company", "searched"]

MODEL = resolve("openai-community/gpt2")
MAX_PROBES = 24


def pool() -> list[Estimate]:
    """The recorded predictions of the sweep."""
    made = answers.estimate()
    return [
        dataclasses.replace(
            made,
            config=TrainConfig(**record["prediction"]["config"]),
            **{
                name: record["prediction"][name]
                for name in (
                    "micro_step_seconds",
                    "optimizer_step_seconds",
                    "peak_reserved_bytes",
                    "nontorch_bytes",
                )
            },
        )
        for record in sweep.records()
    ]


def searched(fleet: Fleet, url: str) -> Measured:
    """Search the sweep on these cards, in the study `s` of a database."""
    candidates = pool()
    spec = next(iter(sweep.measured().values())).spec
    plan = Plan(
        pool=candidates,
        base=candidates[0].config,
        baseline=None,
        budget_bytes=spec.memory_budget_bytes,
        max_probes=MAX_PROBES,
    )
    workload = Workload(model="gpt2", memory_budget_bytes=spec.memory_budget_bytes)
    with (
        open_study(url, "s", workload=workload, gpu="CPU") as study,
        open_probes(url) as table,
    ):
        return search(study, plan, Prober(fleet, table, MODEL, spec))


@contextmanager
def cards_of(
    address: str, wanted: int | None, note: Callable[[str], None] = lambda _: None
) -> Iterator[RayCards]:
    """Stand-ins in a Ray cluster, whose machines find this module on their PYTHONPATH."""
    actor, variables = on_ray.CardActor, on_ray._VARIABLES
    on_ray.CardActor, on_ray._VARIABLES = StandInActor, (*variables, SECONDS, COMPANY)  # type: ignore[misc]
    try:
        with on_ray.connected(address, backend="cpu", wanted=wanted, name=None, note=note) as cards:
            yield cards
    finally:
        on_ray.CardActor, on_ray._VARIABLES = actor, variables  # type: ignore[misc]


def main() -> None:
    with cards_of(sys.argv[1], 3, note=lambda said: print(said, file=sys.stderr)) as cards:
        begun = time.monotonic()
        found = searched(cards, sys.argv[2])
    speed = found.best.tokens_per_second
    print(found.best.config.to_dict(), speed, found.num_run, round(time.monotonic() - begun, 1))


if __name__ == "__main__":
    import stand_in_cards  # a cluster's machines cannot import __main__

    stand_in_cards.main()
