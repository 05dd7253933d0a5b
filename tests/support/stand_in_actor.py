"""Cards that sleep and answer from the recorded sweep (studies/cpu-sweep), as actors of a Ray cluster.

Each is a process of its own, which imports no more than this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import sweep
from ends import ended

from autotune.catalogue import gpus
from autotune.probe.fleet import card_thread
from autotune.probe.fleet.ray_actor import CardActor, CardThere
from autotune.records.fingerprint import Fingerprint, fingerprint_for
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.worker.client.isolate import POLL_SECONDS, WorkerEnd

SECONDS = "AUTOTUNE_STAND_IN_SECONDS"
"""Environment variable: how long a probe takes."""
COMPANY = "AUTOTUNE_STAND_IN_COMPANY"
"""Environment variable: `NUMBER FILE`. A probe goes on until so many ran at once; the file says who ran."""
ALONE_SECONDS = 5.0
"""How long a probe waits for the others that should run beside it."""
HERE = Fingerprint(device="a stand-in", driver="", cuda="", versions=(), allocator="")


@contextlib.contextmanager
def in_company() -> Iterator[Callable[[], bool]]:
    """Note that a probe runs, where a file was asked for, and tell whether it still lacks company."""
    wanted, _, name = os.environ.get(COMPANY, "0").partition(" ")
    if not name:
        yield lambda: False
        return
    file, me = Path(name), secrets.token_hex(4)

    def note(sign: str) -> None:
        with file.open("a", encoding="utf-8") as notes:
            notes.write(f"{sign}{me}\n")

    note("+")
    try:
        yield lambda: company(file)[me] < int(wanted)
    finally:
        note("-")


def company(file: Path) -> dict[str, int]:
    """Return how many probes ran at once at the fullest moment of each that ran, itself among them."""
    lines = file.read_text(encoding="utf-8").splitlines()
    running: set[str] = set()
    most = dict.fromkeys((line[1:] for line in lines), 0)
    for sign, name in ((line[0], line[1:]) for line in lines):
        (running.add if sign == "+" else running.remove)(name)
        most |= {each: max(most[each], len(running)) for each in running}
    return most


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
            return ended({"fingerprint": dataclasses.asdict(HERE)})
        config = TrainConfig(**request["train_config"])
        spec = ProbeSpec(**request["spec"])
        with in_company() as is_alone:
            until = time.monotonic() + self.seconds
            give_up = time.monotonic() + ALONE_SECONDS
            while (now := time.monotonic()) < until or (now < give_up and is_alone()):
                if on_poll is not None:
                    on_poll()
                time.sleep(POLL_SECONDS)
        seen = dataclasses.replace(
            sweep.measured()[config], spec=spec, fingerprint=fingerprint_for(config, HERE)
        )
        return ended({"measurement": seen.to_dict()})


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
