"""Cards that sleep and answer from the recorded sweep (studies/cpu-sweep), as actors of a Ray cluster.

Each is a process of its own, which imports no more than this.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
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
HERE = Fingerprint(device="a stand-in", driver="", cuda="", versions=(), allocator="")


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
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
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
