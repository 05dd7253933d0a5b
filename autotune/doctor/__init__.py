"""Checks of this machine for autotune: what it has, and what is in the way, one line each.

Only what makes autotune fail, and no other program says: `nvidia-smi` tells who holds the card and what
slows it, `pip check` what is missing, `free` the host's memory.

The exit code is that of the first check that failed, in the order of the table; warnings cost nothing.
No check changes anything but files that it makes and removes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.common.secrets import redacted
from autotune.doctor import card, host, libraries, reach
from autotune.doctor.machine import CheckedMachine, NotAnswered
from autotune.doctor.verdict import Diagnosis, Status, fail, warn
from autotune.errors import AutotuneError, ConfigError, HardwareError, StorageError, WorkerError
from autotune.records.estimate import SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check, whose result is one line."""

    name: str
    ask: Callable[[CheckedMachine], Diagnosis]
    error: type[AutotuneError]
    """Error whose exit code a failure has."""


CHECKS = (
    Check(name="driver", ask=card.driver, error=HardwareError),
    Check(name="cuda", ask=card.cuda, error=HardwareError),
    Check(name="torch", ask=libraries.torch, error=WorkerError),
    Check(name="kernels", ask=libraries.kernels, error=HardwareError),
    Check(name="bitsandbytes", ask=libraries.bitsandbytes, error=WorkerError),
    Check(name="flash-attn", ask=libraries.flash_attention, error=WorkerError),
    Check(name="disk", ask=host.disk, error=StorageError),
    Check(name="database", ask=reach.database, error=StorageError),
    Check(name="hub", ask=reach.hub, error=ConfigError),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """A check's result, and how long it took."""

    check: Check
    verdict: Diagnosis
    seconds: float

    def to_dict(self) -> dict[str, object]:
        verdict = self.verdict
        return {
            "name": self.check.name,
            "status": verdict.status.value,
            "said": verdict.said,
            "remedy": verdict.remedy,
            "seconds": round(self.seconds, 3),
        }


def examine(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Run every check, one after the other; a check that breaks is a line that failed."""
    for check in CHECKS:
        started = time.monotonic()
        verdict = _asked(check, machine)
        yield CheckResult(
            check=check,
            verdict=Diagnosis(
                status=verdict.status,
                said=redacted(verdict.said),
                remedy=redacted(verdict.remedy),
            ),
            seconds=time.monotonic() - started,
        )


def exit_code(findings: list[CheckResult]) -> int:
    failed = (found for found in findings if found.verdict.status is Status.FAIL)
    first = next(failed, None)
    return 0 if first is None else first.check.error.exit_code


def to_dict(findings: list[CheckResult]) -> dict[str, object]:
    """Return the object of `doctor --json`."""
    worst = max((found.verdict.status for found in findings), key=list(Status).index)
    return {
        "schema_version": SCHEMA_VERSION,
        "status": worst.value,
        "exit_code": exit_code(findings),
        "seconds": round(sum(found.seconds for found in findings), 3),
        "checks": [found.to_dict() for found in findings],
    }


def _asked(check: Check, machine: CheckedMachine) -> Diagnosis:
    try:
        return check.ask(machine)
    except NotAnswered as end:
        if end.is_cause:
            return fail(f"the process that was asked {end}", "Reinstall what its last words name")
        return warn(f"not known: the process that was asked {end}", "See the line that failed")
    except AutotuneError as error:
        return fail(error.what, error.remedy or error.why or "Try again")
    # What a doctor is called for breaks in ways that nobody foresaw, and the other lines help.
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return fail(
            f"this check broke: {type(error).__name__}: {said}",
            "Please report it, with `autotune --version --verbose`",
        )
