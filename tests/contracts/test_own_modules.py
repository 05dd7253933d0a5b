"""The modules that exports name are those that Transformers' own models have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.catalogue.models import catalogue, resolve
from autotune.catalogue.tasks import PICTURES, tasks_of
from autotune.export.own_modules import attention_modules
from autotune.space.adapters import ATTENTION_PROJECTIONS

FAMILIES = {
    source.config["model_type"]: source
    for source in (resolve(entry.hub_id) for entry in reversed(catalogue()))
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_attention_is_what_the_model_has_of_it(family: str) -> None:
    torch = pytest.importorskip("torch")
    from autotune.records.estimate import TraceSpec
    from autotune.space.config import TrainConfig
    from autotune.worker.build.model import build_base, load_config

    source = FAMILIES[family]
    plain = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="fp32",
        optimizer="sgd",
        attention="eager",
    )
    tasks = tasks_of(family) or ()
    task = source.task if source.task in tasks else PICTURES
    model = build_base(load_config(dict(source.config)), task, TraceSpec.of(plain))
    leaves = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        if not name.startswith("head.")  # ModernBERT's, which no file is written for
    }
    own = tuple(name for name in ATTENTION_PROJECTIONS if name in leaves)
    assert attention_modules(source.name) == own


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("modernbert", {"Wqkv"}),
        ("deberta-v2", {"query_proj", "key_proj", "value_proj"}),
        ("distilbert", {"q_lin", "k_lin", "v_lin", "out_lin"}),
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
        ("deberta", {"self.in_proj", "self.pos_proj", "self.pos_q_proj", "dense"}),
        ("funnel", {"q_head", "k_head", "v_head", "post_proj"}),
        ("ctrl", {"Wq", "Wk", "Wv", "dense"}),
        ("cpmant", {"self_attention.project_q", "self_attention.attention_out"}),
    ],
)
def test_names_of_few_families_are_known(family: str, names: set[str], tmp_path: Path) -> None:
    """A list without them had one layer of ModernBERT trained, and none of DistilBERT."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert names <= set(attention_modules(str(tmp_path)))


@pytest.mark.parametrize("family", ["mamba", "jamba", "wav2vec2"])
def test_what_other_models_call_so_is_no_attention(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert not [name for name in attention_modules(str(tmp_path)) if "." in name]
