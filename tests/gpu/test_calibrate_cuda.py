"""A calibration on a CUDA device: `pytest -m gpu tests/gpu`. Run without one by tools.no_card alone."""

from __future__ import annotations

import pytest

from autotune.catalogue import nvml
from autotune.catalogue.gpus import detect
from autotune.common import json_records
from autotune.errors import HardwareError
from autotune.probe import calibrate
from autotune.probe.calibrate import calibration_of, time_on_card
from autotune.records.calibration import MOST_WAITED, calibration_from_dict
from autotune.worker.client.forkserver import ForkServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not detect(), reason="NVML finds no card here"),
]


def test_tiny_kernels_of_each_kind_are_timed() -> None:
    gpu, card = detect()[0], nvml.identity()
    timing = time_on_card(gpu, card, is_tiny=True)
    assert timing.skipped == ()
    assert (
        timing.timed[0].num_weights > 1
    )  # Small ones take turns, so that none stays in the cache.
    assert set(timing.host_seconds) == {"forward", "backward"}
    found = calibration_of(gpu, card, timing)
    assert found.rates.products is not None
    assert calibration_from_dict(json_records.plain(found)) == found


def test_the_host_is_timed_in_a_fork_that_leaves_the_server_without_cuda() -> None:
    with ForkServer() as server:
        timings = [calibrate.time_host(nvml.identity(), server) for _ in range(2)]
        assert server.unfit_reason == ""
        assert server.last_fork is not None
        assert not server.last_fork.cuda_initialized
    quiet = [each.host_seconds["forward"] for each in timings if each.host_waited <= MOST_WAITED]
    assert max(quiet, default=0.0) <= 1.3 * min(quiet, default=0.0)


def test_another_card_than_the_drivers_first_is_refused() -> None:
    import dataclasses

    other = dataclasses.replace(nvml.identity(), name="NVIDIA of nobody")
    with pytest.raises(HardwareError, match="counts another card first"):
        time_on_card(detect()[0], other, is_tiny=True)


def test_what_finds_no_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose operands are larger than any card."""
    from autotune.speed.calibration_plan import product, tiny_plan

    plan = [product("bfloat16", 2**20, 2**10, 2**20), *tiny_plan("bfloat16")[:1]]
    monkeypatch.setattr(calibrate, "tiny_plan", lambda _half: plan)
    timing = time_on_card(detect()[0], nvml.identity(), is_tiny=True)
    (skipped,) = timing.skipped
    assert skipped.why == "out of memory"
    assert len(timing.timed) == 1
