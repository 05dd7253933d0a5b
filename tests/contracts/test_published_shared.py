"""Published runs that several GPUs share: predicted as the study has recorded."""

from __future__ import annotations

import json

import pytest

from validation import published_shared

pytestmark = pytest.mark.worker


def test_runs_that_gpus_share_are_predicted_as_recorded() -> None:
    """Full fine-tuning by FSDP over NVLink, and LoRA by DDP through the host's memory."""
    path = published_shared.STUDY / "rows.json"
    known = {row["id"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    found = published_shared.predict({"mpt-142", "fq-010"})
    assert [row.id for row in found] == ["mpt-142", "fq-010"]
    for row in found:
        recorded = known[row.id]
        assert row.predicted_seconds == pytest.approx(recorded["predicted_seconds"], rel=1e-6)
        assert row.published_seconds == pytest.approx(recorded["published_seconds"])
        assert row.is_within == recorded["is_within"]
        assert 0.75 < row.ratio < 1.1
    assert len(known) == len(published_shared.published())
