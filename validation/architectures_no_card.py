"""Every architecture for causal language models, full size: memory under PyTorch's CUDA build, no card.

    python -m tools.no_card --gpu H200 --memory-gib 16384 -- python -m validation.architectures_no_card

Each type is taken as its configuration class makes it, of its own width, heads and vocabulary; where it has
many layers, of the first few (`layers`). It is built on "cuda" and trained by the real Trainer through
autotune's own probe; what PyTorch's allocator counted stands beside the prediction. Nothing is computed:
what depends on values (how a router spreads tokens) is not as on a card. See tools/no_card.

Each line of the file is one run; what is recorded is not run again. To have it run again, delete its line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import Gpu, detect, find_gpu
from autotune.catalogue.models import ModelSource
from autotune.errors import AutotuneError
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import Prober
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import WorkerEnd
from tools.gpu_check.records import Records

STUDY = Path(__file__).parents[1] / "studies" / "architectures-no-card"
DEADLINE_SECONDS = 150.0
"""Of one trace or probe."""
MICRO_BATCH, LENGTH = 4, 1024
LENGTHS = ((1027, 1024), (259, 256), (0, 64))
"""(learned positions at least, tokens): some count from their padding's number on."""
LAYERS = 8
"""Of models with more; their patterns of layers are mostly shorter."""
COMMON: dict[str, Any] = {
    "micro_batch_size": MICRO_BATCH,
    "gradient_accumulation_steps": 2,
    "optimizer": "adamw_torch_fused",
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "precision": "bf16-true"},
    "lora": {
        "method": "lora",
        "precision": "bf16-autocast",
        "lora_rank": 16,
        "lora_targets": "all-linear",
    },
    "checkpointed": {"method": "full", "precision": "bf16-true", "activation_checkpointing": 1},
}
ATTENTIONS = ("sdpa", "eager")
"""The second where the model has no first."""
MAPPINGS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


class Impatient:
    """A fork server whose jobs have DEADLINE_SECONDS at most."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def run(self, verb: str, request: Any, *, deadline_seconds: float, **rest: Any) -> WorkerEnd:
        seconds = min(deadline_seconds, DEADLINE_SECONDS)
        return self._server.run(verb, request, deadline_seconds=seconds, **rest)


class Forgetful:
    """Stands for the table of probes: the records remember."""

    def find(self, *_: Any, **__: Any) -> None:
        return None

    def add(self, *_: Any, **__: Any) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One architecture, and what of it is trained."""

    task: str
    source: ModelSource
    length: int
    layers: int | None
    """None where the configuration does not say."""


def subject(kind: str, task: str, *, is_cut: bool = True) -> Subject:
    """As the configuration class makes it; `is_cut`: with LAYERS layers at most."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from autotune.worker.build.layers import num_layers, text_part

    config = CONFIG_MAPPING[kind]()
    num = num_layers(config)
    values: dict[str, Any] = {"model_type": kind}
    text = text_part(config)
    if is_cut and num > LAYERS:
        num = LAYERS
        cut = {"num_hidden_layers": num}
        part = next((n for n in config.sub_configs if getattr(config, n, None) is text), None)
        values |= cut if part is None else {part: cut}
    names = ("max_position_embeddings", "max_target_positions", "n_positions")
    positions = min(
        (value for name in names if isinstance(value := getattr(text, name, None), int)),
        default=LENGTHS[0][0],
    )
    return Subject(
        task=task,
        source=ModelSource(
            name=kind,
            config=values,
            origin="file",
            path=Path("config.json"),
        ),
        length=next(length for least, length in LENGTHS if positions >= least),
        layers=num or None,
    )


def card_here() -> Gpu:
    """The catalogue's, with as much memory as it is given."""
    here = detect()[0]
    return dataclasses.replace(find_gpu(here.name), capacity_bytes=here.capacity_bytes)


def predicted(
    subjects: Sequence[Subject], case: str, card: Gpu, server: Any
) -> tuple[Subject, TrainConfig, Estimate | str]:
    """By the first subject and attention that can be traced; else why none can."""
    refused = ""
    for of in subjects:
        for attention in ATTENTIONS:
            config = TrainConfig(
                sequence_length=of.length, attention=attention, **COMMON, **CASES[case]
            )
            spec = TraceSpec.of(config)
            try:
                traces = trace_all(of.source, of.task, of.length, card, [spec], server=server)
            except AutotuneError as error:
                refused = refused or str(error)
            else:
                estimator = Estimator(traces, card, memory_budget_bytes=card.capacity_bytes)
                return of, config, estimator.estimate(config)
    return subjects[-1], config, refused


def record(
    of: Subject, case: str, config: TrainConfig, estimate: Estimate | str, prober: Prober
) -> dict[str, Any]:
    """One line: what was predicted, and what PyTorch's allocator counted."""
    began = time.monotonic()
    fields: dict[str, Any] = {
        "task": of.task,
        "model_type": of.source.name,
        "case": case,
        "layers": of.layers,
        "sequence_length": of.length,
        "attention": config.attention,
    }
    if isinstance(estimate, str):
        return {**fields, "outcome": "refused", "message": estimate}
    seen = prober.measure(config)
    return {
        **fields,
        "predicted": [estimate.peak_allocated_bytes, estimate.peak_reserved_bytes],
        "pytorch": [seen.peak_allocated_bytes, seen.peak_reserved_bytes],
        "outcome": seen.outcome,
        "message": seen.message,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", help="model types [default: all]")
    parser.add_argument("--task", choices=MAPPINGS, default="causal-lm")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=STUDY / "rows.jsonl")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    records = Records(options.out)
    card = card_here()
    spec = ProbeSpec(
        task=options.task,
        backend="cuda",
        memory_budget_bytes=card.capacity_bytes,
        max_seconds=0.0,
        max_steps=1,
    )
    # One each: the environments of the two verbs differ, and a server has one.
    with ForkServer() as tracing, ForkServer() as probing:
        tracer: Any = Impatient(tracing)
        server: Any = Impatient(probing)
        table: Any = Forgetful()
        for kind in options.types or getattr(modeling_auto, MAPPINGS[options.task]):
            wanted = [
                case for case in options.cases if _key(options.task, kind, case) not in records
            ]
            if not wanted:
                continue
            try:
                subjects = [subject(kind, options.task, is_cut=is_cut) for is_cut in (True, False)]
            except Exception as error:
                line = {"task": options.task, "model_type": kind, "outcome": "refused"}
                line["message"] = f"no configuration: {str(error).splitlines()[0]}"
                records.add(_key(options.task, kind, wanted[0]), case=wanted[0], **line)
                continue
            for case in wanted:
                of, config, estimate = predicted(subjects, case, card, tracer)
                prober = Prober(OneCard(server), table, of.source, spec)
                line = record(of, case, config, estimate, prober)
                records.add(_key(options.task, kind, case), **line)
                say(_shown(line))


def _key(task: str, kind: str, case: str) -> str:
    return f"{task} {kind} {case}"


def _shown(line: dict[str, Any]) -> str:
    text = f"{line['model_type']:24} {line['case']:12} {line['outcome']:8}"
    with contextlib.suppress(KeyError, TypeError):
        for predicted, real in zip(line["predicted"], line["pytorch"], strict=True):
            text += f"{predicted / real - 1:+9.3%}"
        text += f" {line['pytorch'][0] / 2**30:8.2f} GiB {line['seconds']:.0f} s"
    return f"{text} {line['message'][:200]}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
