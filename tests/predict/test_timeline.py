"""Made-up steps: which of them are replayed, and the one that a chart draws."""

from __future__ import annotations

from autotune.common.units import MIB
from autotune.memory.allocator import EMPTY_CACHE
from autotune.predict.steps import StepPart, Steps
from autotune.predict.timeline import timeline_of
from autotune.records.charts import StepPhase

WEIGHT, SMALL, LARGE, HUGE = range(4)
SIZES = [MIB, 30 * MIB, 50 * MIB, 90 * MIB]
CATEGORIES = ["parameter", "activation", "temporary", "activation"]


def steps(*tensors: int, sure_step: int) -> Steps:
    """Steps that make and free one tensor each."""
    return Steps(
        sizes=SIZES,
        categories=CATEGORIES,
        parts=[
            StepPart(-1, StepPhase.SETUP, [WEIGHT, EMPTY_CACHE]),
            *(
                StepPart(number, StepPhase.FORWARD, [each, ~each])
                for number, each in enumerate(tensors)
            ),
        ],
        sure_step=sure_step,
    )


def test_steps_run_until_one_reserves_no_more() -> None:
    peak = steps(SMALL, SMALL, LARGE, LARGE, HUGE, sure_step=1).replay().peak_allocated_bytes
    # The third reserves more than the second, the fourth no more: the fifth is not looked at.
    assert peak == 51 * MIB
    # The last of the sure steps runs, and what follows it is asked first whether it reserves more.
    assert steps(SMALL, SMALL, LARGE, sure_step=0).replay().peak_allocated_bytes == 31 * MIB
    assert steps(SMALL, SMALL, LARGE, sure_step=1).replay().peak_allocated_bytes == 51 * MIB
    assert steps(SMALL, SMALL, LARGE, sure_step=2).replay().peak_allocated_bytes == 51 * MIB


def test_the_step_that_peaks_is_drawn_phase_by_phase() -> None:
    made = Steps(
        sizes=SIZES,
        categories=CATEGORIES,
        parts=[
            StepPart(-1, StepPhase.SETUP, [WEIGHT]),
            StepPart(0, StepPhase.FORWARD, [SMALL, ~SMALL]),
            StepPart(1, StepPhase.FORWARD, [SMALL]),
            StepPart(1, StepPhase.BACKWARD, [LARGE, ~LARGE, ~SMALL]),
        ],
        sure_step=1,
    )
    drawn = timeline_of(made, 4)
    assert drawn.phases == {StepPhase.FORWARD: 0, StepPhase.BACKWARD: 1}
    assert drawn.bytes_by_category["parameter"] == (MIB,) * 4
    assert drawn.bytes_by_category["activation"] == (30 * MIB, 30 * MIB, 30 * MIB, 0)
    assert drawn.bytes_by_category["temporary"] == (0, 50 * MIB, 0, 0)
    assert drawn.peak_point == 1


def test_what_peaks_while_weights_are_loaded_peaks_before_the_first_step() -> None:
    drawn = timeline_of(steps(SMALL, LARGE, sure_step=1), 0)
    assert drawn.bytes_by_category["activation"] == (30 * MIB, 0)
    assert drawn.peak_point == 0
