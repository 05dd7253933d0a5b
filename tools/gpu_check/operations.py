"""Where the time of real steps goes, operation by operation, as PyTorch's profiler sees it on the card.

operations.jsonl
    {"schema_version", "key", "model", "prediction": {Estimate.to_dict}, and the answer of the worker's verb
    `profile`, or "problem" in its place}
outside.jsonl
    {"schema_version", "key": what was done for the first time, "outside_bytes", "problem"}: by the verb
    `outside`

The profiler makes the host slower: times of operations on the device are what this is about, and no
`measurement` of it counts.
"""

from __future__ import annotations

import time
from typing import Any

from autotune.records.measurement import ProbeSpec
from tools.gpu_check import cases as gpu_cases
from tools.gpu_check.check import Check, say, shown
from tools.gpu_check.deadline import PunctualServer
from tools.gpu_check.predictions import Predictions

SECONDS = 120.0
"""A process that takes longer is killed."""


def operations(check: Check) -> bool:
    """See what a process holds beside PyTorch; profile a step of each case that is not recorded yet."""
    if check.backend == "cuda" and not _outside(check):
        return False
    cases = gpu_cases.TINY_CASES[:1] if check.tiny else gpu_cases.PROFILED
    records = check.records("operations")
    server = PunctualServer(check.server, check.deadline)
    with Predictions(check.card, cases, check.budget_bytes) as predictions:
        for case in cases:
            key = f"{case.model} {shown(case.config)}"
            if key in records:
                continue
            if not check.deadline.allows_another():
                return False
            estimate = predictions.of(case.model, case.config)
            if estimate is None:
                continue
            spec = ProbeSpec(
                task=gpu_cases.TASK,
                backend=check.backend,
                memory_budget_bytes=check.budget_bytes,
                max_seconds=60.0,
                target_spread=0.0,
                max_steps=8,
            )
            request = gpu_cases.request(case, spec)
            began = time.monotonic()
            end = server.run("profile", request, deadline_seconds=SECONDS)
            if end.how == "timeout" and not check.deadline.allows_another():
                return False
            found: dict[str, Any] = {"problem": end.stderr_tail}
            if end.how == "ok":
                (found,) = end.answers
            prediction = estimate.to_dict(check.budget_bytes)
            records.add(key, model=case.model, prediction=prediction, **found)
            told = "profiled" if "busy_seconds" in found else "failed"
            say(f"{told:8} {time.monotonic() - began:6.1f} s  {key}")
    return True


def _outside(check: Check) -> bool:
    records = check.records("outside")
    if "context" in records:
        return True
    if not check.deadline.allows_another():
        return False
    end = PunctualServer(check.server, check.deadline).run("outside", {}, deadline_seconds=SECONDS)
    for answer in end.answers:
        records.add(answer.pop("did"), **answer)
    return True
