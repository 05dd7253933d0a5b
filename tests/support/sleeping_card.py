"""A card of a Ray cluster whose probes sleep, and answer what was recorded: for tests that kill machines."""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.catalogue import installed
from autotune.common.version import __version__
from autotune.probe.fleet.card_thread import Said
from autotune.probe.fleet.ray_actor import CardActor, CardThere
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.worker.client.isolate import WorkerEnd

RECORDS = Path(__file__).parents[2] / "studies" / "cpu-sweep" / "sweep.jsonl"
SPEC = ProbeSpec(task="causal-lm", backend="cpu", memory_budget_bytes=50_000_000, max_seconds=3.0)


def recorded() -> dict[TrainConfig, Measurement]:
    """What the sweep has measured, by configuration."""
    seen = [
        measurement_from_dict(json.loads(line)["measurement"])
        for line in RECORDS.read_text(encoding="utf-8").splitlines()
    ]
    return {each.config: dataclasses.replace(each, spec=SPEC) for each in seen}


class SleepingCard(CardActor):
    """Answers as a card does, after `AUTOTUNE_TEST_SLEEP` seconds; it starts no process."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._seconds = float(variables["AUTOTUNE_TEST_SLEEP"])
        self._log = variables["AUTOTUNE_TEST_LOG"]
        self._says: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._recorded = recorded()

    def describe(self, backend: str) -> CardThere:
        assert backend == "cpu"
        versions = (("autotune", __version__), *installed.versions())
        return CardThere(node="a node", gpu=None, why_no_card="", versions=versions)

    def ask_fingerprint(self, backend: str) -> None:
        assert backend == "cpu"
        self._say(next(iter(self._recorded.values())).fingerprint)

    def start(self, request: Mapping[str, Any], deadline_seconds: float) -> None:
        threading.Thread(target=self._probe, args=(request, deadline_seconds), daemon=True).start()

    def _probe(self, request: Mapping[str, Any], deadline_seconds: float) -> None:
        assert deadline_seconds > self._seconds
        spec = ProbeSpec(**request["spec"])
        seen = self._recorded[TrainConfig(**request["train_config"])]
        time.sleep(self._seconds)
        answer = {"measurement": dataclasses.replace(seen, spec=spec).to_dict()}
        with open(self._log, "a", encoding="ascii") as log:
            log.write("probed\n")
        self._say(
            WorkerEnd(
                how="ok",
                exit_code=0,
                answers=(answer,),
                num_partial_lines=0,
                problem="",
                stderr_tail="",
            )
        )

    def _say(self, what: Fingerprint | WorkerEnd) -> None:
        self._says.put(Said(None, what))  # type: ignore[arg-type]  # nobody asks which card it is

    def stop(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass
