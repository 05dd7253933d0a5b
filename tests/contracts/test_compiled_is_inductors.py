"""A predicted compiled step against Inductor itself: what is saved, and what kernels move."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["Llama", "Qwen 3"])
def test_a_small_model_saves_and_moves_what_inductor_does(name: str) -> None:
    from validation import compiled  # Inductor's modules warn when they are imported

    passes, graphs, saved_bytes = compiled.fused(name, "fp32", "cpu")
    assert graphs == 1
    assert compiled.saved_bytes(name, "fp32") == pytest.approx(saved_bytes, abs=1024)
    assert [each.direction for each in passes] == ["forward", "backward"]
    for each in passes:
        assert each.predicted_bytes == pytest.approx(each.real_bytes, rel=0.06)
