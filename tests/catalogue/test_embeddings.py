"""What comes behind a model that embeds texts, read off files beside its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue.embeddings import BEHIND, with_modules_behind
from autotune.catalogue.models import resolve

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {
    "path": "2_Normalize",
    "type": "sentence_transformers.base.modules.normalize.Normalize",
}


WIDTHS = {"in_features": 8, "out_features": 4}


def written(folder: Path, modules: Any, pooling: Any = None) -> Path:
    (folder / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    text = modules if isinstance(modules, str) else json.dumps(modules)
    (folder / "modules.json").write_text(text, encoding="utf-8")
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        said = json.dumps(pooling)
        (folder / "1_Pooling" / "config.json").write_text(said, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        ([TRANSFORMER], None, {}),
        ([TRANSFORMER, POOLING], None, {"pooling": "mean"}),
        ([TRANSFORMER, POOLING], {"pooling_mode": "cls"}, {"pooling": "cls"}),
        ([TRANSFORMER, POOLING], {"pooling_mode": ["cls", "max"]}, {"pooling": ["cls", "max"]}),
        (
            [TRANSFORMER, POOLING, NORMALIZE],
            {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True},
            {"pooling": ["lasttoken"], "normalizes": True},
        ),
        (
            [TRANSFORMER, {"path": "1", "type": "sentence_transformers.models.Dense"}],
            None,
            {"others": "sentence_transformers.models.Dense"},
        ),
        (
            [TRANSFORMER, {"path": "1_Pooling", "type": "sentence_transformers.models.Dense"}],
            {**WIDTHS, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
            {"layers": [{**WIDTHS, "bias": False, "activation": "Identity"}]},
        ),
        (
            [TRANSFORMER, {"path": "1_Pooling", "type": "sentence_transformers.models.LayerNorm"}],
            {"dimension": 8},
            {"layers": [{"dimension": 8}]},
        ),
        *(
            (
                [*before, {"path": "1_Pooling", "type": "sentence_transformers.models.Dense"}],
                {**WIDTHS, **more},
                {"others": "sentence_transformers.models.Dense", **said},
            )
            for before, more, said in (
                ([TRANSFORMER, NORMALIZE], {}, {"normalizes": True}),
                ([TRANSFORMER], {"activation_function": "os.system"}, {}),
                ([TRANSFORMER], {"activation_function": "torch.nn.functional.relu"}, {}),
                ([TRANSFORMER], {"use_residual": True}, {}),
                ([TRANSFORMER], {"module_input_name": "token_embeddings"}, {}),
                ([TRANSFORMER], {"out_features": -1}, {}),
                ([TRANSFORMER], {"in_features": "8"}, {}),
            )
        ),
        # Code of the repository, which is named and never run.
        (
            [TRANSFORMER, {"path": "", "type": "custom.Pooling"}],
            None,
            {"others": "custom.Pooling"},
        ),
    ],
)
def test_modules_are_read_off_the_models_files(
    modules: Any, pooling: Any, said: dict[str, Any], tmp_path: Path
) -> None:
    source = resolve(str(written(tmp_path, modules, pooling)))
    assert source.task == "sentence-similarity"
    assert with_modules_behind(source).config == {"model_type": "bert", BEHIND: said}


def test_a_folder_elsewhere_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"pooling_mode": "max"}', encoding="utf-8")
    model = tmp_path / "model"
    model.mkdir()
    written(model, [TRANSFORMER, {**POOLING, "path": ".."}])
    assert with_modules_behind(resolve(str(model))).config[BEHIND] == {"pooling": "mean"}


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[" * 100_000])
def test_files_that_say_nothing_leave_the_model_as_it_is(text: str, tmp_path: Path) -> None:
    source = resolve(str(written(tmp_path, text)))
    assert with_modules_behind(source) == source
