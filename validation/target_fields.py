"""Names that released versions of Transformers and TRL take, for autotune/export/target_fields.toml.

    python -m validation.target_fields WHEELS > autotune/export/target_fields.toml

reads the wheels in that folder, one per minor version, and never imports them. Each was fetched by
`pip download --no-deps --no-binary :none: -d WHEELS transformers==X`, the first of its minor version
that `pip index versions` lists, so that what a later patch of it takes is at least near.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from autotune.export.installed import fields_of

HEADER = """\
# Names that a release takes, read from its wheel on PyPI by validation/target_fields.py: what each
# release adds to and removes from the one before it. A release without either takes the same.
#
# transformers: fields of TrainingArguments; optim=NAME for what `optim` may be (OptimizerNames), and
#               checkpointing.NAME for what PreTrainedModel's method takes beside torch's own options.
# trl:          fields of SFTConfig and of its base class that TRL has, not TrainingArguments';
#               ModelConfig.NAME for those of ModelConfig.
"""


def names_of_transformers(wheel: zipfile.ZipFile) -> set[str]:
    source = wheel.read("transformers/training_args.py").decode()
    body = class_body(source, "OptimizerNames")
    optimizers = {ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)}
    body = class_body(wheel.read("transformers/modeling_utils.py").decode(), "PreTrainedModel")
    options = {
        argument.arg
        for node in body
        if isinstance(node, ast.FunctionDef)
        and node.name in ("gradient_checkpointing_enable", "activation_checkpointing_enable")
        for argument in node.args.args[2:]
    }
    return {
        *fields_of(source, "TrainingArguments"),
        *(f"optim={name}" for name in optimizers),
        *(f"checkpointing.{name}" for name in options),
    }


def names_of_trl(wheel: zipfile.ZipFile) -> set[str]:
    source = wheel.read("trl/trainer/sft_config.py").decode()
    found = set(fields_of(source, "SFTConfig"))
    if "trl/trainer/base_config.py" in wheel.namelist():
        base = wheel.read("trl/trainer/base_config.py").decode()
        (name,) = (node.name for node in ast.parse(base).body if isinstance(node, ast.ClassDef))
        found |= set(fields_of(base, name))
    model = fields_of(wheel.read("trl/trainer/model_config.py").decode(), "ModelConfig")
    return {*found, *(f"ModelConfig.{name}" for name in model)}


def class_body(source: str, name: str) -> list[ast.stmt]:
    nodes = ast.parse(source).body
    (body,) = (node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == name)
    return body


READERS = {"transformers": names_of_transformers, "trl": names_of_trl}


def release_of(path: Path) -> str:
    return path.name.split("-")[1]


def as_list(key: str, names: Iterable[str]) -> str:
    entries = "".join(f"  {json.dumps(name)},\n" for name in sorted(names))
    return f"{key} = [\n{entries}]\n" if entries else ""


def main() -> None:
    print(HEADER, end="")
    for library, read in READERS.items():
        before: set[str] = set()
        paths = Path(sys.argv[1]).glob(f"{library}-*.whl")
        for path in sorted(paths, key=lambda path: [*map(int, release_of(path).split("."))]):
            with zipfile.ZipFile(path) as wheel:
                names = read(wheel)
            print(f'\n[[{library}]]\nrelease = "{release_of(path)}"')
            print(as_list("added", names - before) + as_list("removed", before - names), end="")
            before = names


if __name__ == "__main__":
    main()
