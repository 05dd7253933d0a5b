"""Cards that sleep and answer from the recorded sweep (studies/cpu-sweep), and a search over them.

`python -P tests/support/stand_in_cards.py ADDRESS DATABASE` searches on three of a Ray cluster, for those who
kill it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import answers
import sweep

from autotune.catalogue import gpus
from autotune.catalogue.models import resolve
from autotune.probe.fleet import card_thread, on_ray
from autotune.probe.fleet.fleet import Fleet
from autotune.probe.fleet.ray_actor import CardActor, CardThere
from autotune.probe.fleet.ray_cards import RayCards
from autotune.probe.loop import Plan, search
from autotune.probe.run_one import Prober
from autotune.records.answer import Measured
from autotune.records.estimate import Estimate
from autotune.records.fingerprint import Fingerprint, fingerprint_for
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig, Workload
from autotune.store.optuna_study import open_study
from autotune.store.probe_table import open_probes
from autotune.worker.client.isolate import POLL_SECONDS, WorkerEnd

SECONDS = "AUTOTUNE_STAND_IN_SECONDS"
"""Environment variable: how long a probe takes."""
HERE = Fingerprint(device="a stand-in", driver="", cuda="", versions=(), allocator="")
MODEL = resolve("openai-community/gpt2")
MAX_PROBES = 24


class StandInServer:
    """Stands in for a card's fork server."""

    def __init__(self, **_: Any) -> None:
        self.seconds = float(os.environ[SECONDS])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(
        self,
        verb: str,
        request: Mapping[str, Any],
        *,
        deadline_seconds: float,
        on_answer: Callable[[dict[str, Any]], None] | None = None,
        on_poll: Callable[[], None] | None = None,
    ) -> WorkerEnd:
        if verb == "fingerprint":
            return _ended({"fingerprint": dataclasses.asdict(HERE)})
        config = TrainConfig(**request["train_config"])
        spec = ProbeSpec(**request["spec"])
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            if on_poll is not None:
                on_poll()
            time.sleep(POLL_SECONDS)
        seen = dataclasses.replace(
            sweep.measured()[config], spec=spec, fingerprint=fingerprint_for(config, HERE)
        )
        return _ended({"measurement": seen.to_dict()})


def _ended(answer: dict[str, Any]) -> WorkerEnd:
    return WorkerEnd(
        how="ok", exit_code=0, answers=(answer,), num_partial_lines=0, problem="", stderr_tail=""
    )


class StandInActor(CardActor):
    """An actor whose card is a stand-in."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        card_thread.ForkServer = StandInServer  # type: ignore[assignment,misc]
        super().__init__(variables)


class GpuActor(StandInActor):
    """An actor whose stand-in is of the kind that its machine's resource accelerator_type names."""

    def describe(self, backend: str) -> CardThere:
        import ray

        here = ray.get_runtime_context().get_node_id()
        (resources,) = (each["Resources"] for each in ray.nodes() if each["NodeID"] == here)
        (kind,) = (name for name in resources if name.startswith("accelerator_type:"))
        there = super().describe("cpu")
        gpu = gpus.find_gpu(kind.partition(":")[2])
        return dataclasses.replace(there, gpu=gpu, kind=gpu.name)


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
    on_ray.CardActor, on_ray._VARIABLES = StandInActor, (*variables, SECONDS)  # type: ignore[misc]
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
