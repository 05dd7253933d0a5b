"""Configurations drawn at random, predicted and run by PyTorch's CUDA build: their memory side by side.

    python -m tools.no_card --gpu H200 -- \\
        python -m validation.no_card_fuzz --seed 1 --num 50 --out drawn.jsonl

Under tools/no_card nothing is computed and every allocation is PyTorch's own; on a card it runs as well.
Each differs from a plain one in a few settings, in one more often than in two. What a rule refuses, what
the model does not have and what is not installed is not drawn, nor is a compiled step of which eager's
figures are all that is predicted. A line each: the prediction against what was seen, of allocated and of
reserved bytes. What depends on values (places without tokens,
LLM.int8's outliers, an overflow of float16) is no error. A plan of checkpointing needs six
layers, or six times the model's pattern of them; one that offloads eight.

--out: the same, a JSON object per line {"schema_version", "key", "model", "num_layers",
"capped_at_prediction", "prediction": {Estimate.to_dict}, "measurement": {Measurement.to_dict}}; what it has
already is not run again.
--task: with several, one of them is drawn for each configuration. --teacher: for --task distillation, of the
same vocabulary as all of the models.
--capped: with what is predicted to do as the budget, in place of all of the card.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from autotune.catalogue.models import ModelSource, resolve
from autotune.common.units import MIB
from autotune.errors import AutotuneError
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import Prober
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.records.question import Question
from autotune.search.sounds import read_sound
from autotune.space import requirements
from autotune.space.checkpoint_plans import INTERVAL, plan_offloads
from autotune.space.compilation import why_not_predicted
from autotune.space.config import METHODS, TrainConfig
from autotune.space.knobs import KNOBS, REQUIRED
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import usual_batching
from autotune.space.teacher import Teacher
from autotune.space.trainers import BY_TASK, DISTILLATION, FIXED_BY_A_TEACHER, row_of
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check.cases import TASK
from tools.gpu_check.check import Nothing, card_and_budget, say, shown
from tools.gpu_check.records import Records
from validation.timing.speed import config_of

MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "openai-community/gpt2",
    "google/gemma-2-2b", "google/gemma-3-1b-it", "microsoft/Phi-3-mini-4k-instruct",
    "mistralai/Mistral-7B-v0.3", "allenai/OLMo-2-1124-7B", "facebook/opt-1.3b",
    "EleutherAI/pythia-1b", "tiiuae/falcon-7b", "Qwen/Qwen3-30B-A3B",
)  # fmt: skip
NUMBERS: dict[str, tuple[int, ...]] = {
    "micro_batch_size": (1, 2, 3, 4, 8, 16, 32),
    "gradient_accumulation_steps": (1, 2),
    "sequence_length": (128, 200, 512, 1000, 1024, 2048, 4096, 8192),
    "activation_checkpointing": (0, 1, 2, 3),
    "lora_rank": (1, 8, 16, 63, 256),
    "num_virtual_tokens": (1, 20, 100),
    "torch_empty_cache_steps": (0, 1, 2),
}
"""Of settings that are numbers; the others have their knob's choices."""
SECONDS = (1.0, 2.5, 5.0, 10.0)
"""Of sounds, where a model reads any length."""
_OF_ONE_LENGTH = ("whisper", "audio-spectrogram-transformer")
"""Models that read as much sound of each sample."""
_MOST_TOKENS = 32768
"""Of a micro-batch: more takes a probe's time and tells nothing new."""
_FIXED = ("micro_batch_size", "peft", "parallelism", "lora_alpha_ratio", "checkpoint_layers")
_LEAST_STRETCH = {False: 3, True: 4}
"""Fewest layers of either stretch of a plan that does not offload, and of one that does
(autotune.search.solved_checkpointing)."""


def of_family(model_type: str) -> ModelSource:
    """Transformers' default configuration of a family of models, in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**json.loads(config_of(model_type)), "dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        return dataclasses.replace(resolve(folder), name=model_type)


def cut(model: str, num_layers: int) -> ModelSource:
    """The model with so many layers: what repeats costs time alone. 0: with all.

    A name that is no folder, and has no owner, is a family's.
    """
    is_family = "/" not in model and not Path(model).exists()
    source = of_family(model) if is_family else resolve(model)
    config = dict(source.config)
    for key in ("num_hidden_layers", "n_layer"):
        if num_layers and key in config:
            config[key] = min(config[key], num_layers)
    if num_layers and isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:num_layers]
    return dataclasses.replace(source, config=config, num_parameters_known=None)


def draw(
    chance: random.Random, only: list[str], methods: list[str], num_layers: int | None
) -> TrainConfig:
    """One that may break a rule. `only`: settings that differ from the plain ones."""
    method = chance.choice(methods)
    # Numbers of other tasks have no choices.
    domains = {
        knob.name: choices
        for knob in KNOBS.values()
        if method in knob.methods
        and knob.name not in _FIXED
        and (choices := NUMBERS.get(knob.name) or knob.choices)
    }
    values: dict[str, Any] = {
        name: KNOBS[name].default_for(method)
        for name in domains
        if KNOBS[name].default_for(method) is not REQUIRED
    }
    plain = ("bf16-true", "bf16-mixed") if method == "full" else ("bf16-autocast",)
    values |= {"precision": chance.choice(plain), "optimizer": "adamw_torch_fused"}
    values |= {
        name: chance.choice(NUMBERS[name])
        for name in ("micro_batch_size", "gradient_accumulation_steps", "sequence_length")
    }
    others = sorted(only or chance.sample(sorted(domains), chance.choice((1, 1, 1, 2, 3, 5))))
    for name in others:
        if name in domains:
            values[name] = chance.choice(domains[name])
    if values.get("update_in_backward"):
        values["gradient_accumulation_steps"] = 1
    plan = values.get("checkpoint_plan", INTERVAL)
    if plan != INTERVAL:
        values["activation_checkpointing"] = 1
        least = _LEAST_STRETCH[plan_offloads(plan)]
        values["checkpoint_layers"] = chance.randint(least, max(least, (num_layers or 0) - least))
    return TrainConfig(method=method, **values)


def of_task(config: TrainConfig, task: str, chance: random.Random) -> TrainConfig:
    """The configuration with what the task's own trainer has to know."""
    values: dict[str, Any] = {}
    if not row_of(task).packs and config.batching == "packed":
        values["batching"] = "padded"
    row = BY_TASK.get(task)
    if row is None:
        return dataclasses.replace(config, **values)
    values |= {"trainer": row.name, "batching": usual_batching(task)}
    if row.generates is not None:
        values |= {
            "num_generations": chance.choice((2, 4)),
            "max_completion_length": config.sequence_length // 2,
            "kl_beta": chance.choice((0.0, 0.04)),
            "num_iterations": 1,
        }
    if row.has_teacher:
        values |= FIXED_BY_A_TEACHER
    return dataclasses.replace(config, **values)


def is_valid(
    config: TrainConfig, source: ModelSource, task: str, capability: tuple[int, int] | None
) -> bool:
    longest = source.max_sequence_length
    context = Context(
        effective_batch_size=config.effective_batch_size,
        num_layers=source.num_layers,
        compute_capability=capability,
        max_sequence_length=longest,
        head_size=source.head_size,
        task=task,
    )
    return (
        config.attention in source.attentions
        and (longest is None or config.sequence_length <= longest)
        and config.micro_batch_size * config.sequence_length <= _MOST_TOKENS
        and not broken_rules(config, context)
        and not requirements.of_config(config)
        and not (config.is_compiled and why_not_predicted(config))
    )


def line(estimate: Estimate, seen: Measurement) -> str:
    if seen.outcome != "ok":
        return f"{seen.outcome}: {seen.message}"
    assert seen.peak_allocated_bytes
    assert seen.peak_reserved_bytes
    allocated = estimate.peak_allocated_bytes / seen.peak_allocated_bytes - 1
    reserved = estimate.peak_reserved_bytes / seen.peak_reserved_bytes - 1
    size = f"of {seen.peak_allocated_bytes / MIB:.0f} MiB"
    return f"allocated {allocated:+.2%}, reserved {reserved:+.2%} {size}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=20, help="configurations")
    parser.add_argument("--layers", type=int, default=0, help="of each model, at most [all]")
    parser.add_argument("--model", action="append", help="one of these alone, or a family")
    parser.add_argument("--task", action="append", help=f"what they are trained for [{TASK}]")
    parser.add_argument("--teacher", help="the model whose next words are learnt")
    parser.add_argument("--method", action="append", help="one of these alone")
    parser.add_argument("--only", action="append", default=[], help="a setting that differs")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="that of every configuration")
    parser.add_argument("--attention", choices=KNOBS["attention"].choices, help="the same")
    parser.add_argument("--micro-batch-size", type=int, help="the same")
    parser.add_argument("--sequence-length", type=int, help="the same")
    parser.add_argument("--capped", action="store_true", help="at what is predicted")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    card, budget_bytes = card_and_budget("cuda", None)
    chance, records = random.Random(options.seed), Records(options.out)
    methods = options.method or [name for name in METHODS if name != "peft"]
    table: Any = Nothing()
    tasks = options.task or [TASK]
    teacher = None
    if options.teacher is not None:
        config_json = json.dumps(cut(options.teacher, options.layers).config)
        teacher = Teacher(name=options.teacher, config_json=config_json)
    with ForkServer() as tracers, ForkServer() as probes:
        for _ in range(options.num):
            while True:
                task = chance.choice(tasks) if len(tasks) > 1 else tasks[0]
                taught_by = teacher if task == DISTILLATION else None
                source = cut(chance.choice(options.model or MODELS), options.layers)
                num_layers = source.num_layers or source.config.get("num_layers")
                config = draw(chance, options.only, methods, num_layers)
                config = of_task(config, task, chance)
                for name in ("optimizer", "attention", "micro_batch_size", "sequence_length"):
                    if value := getattr(options, name):
                        config = dataclasses.replace(config, **{name: value})
                if is_valid(config, source, task, card.compute_capability):
                    break
            if not row_of(task).has_lengths:
                config = dataclasses.replace(config, sequence_length=1)
            key = f"{source.name} {options.layers} {shown(config)} {config.lora_dropout}"
            key += " capped" * options.capped
            if key in records:
                continue
            heard = None
            if row_of(task).reads == "waves":
                is_free = source.config["model_type"] not in _OF_ONE_LENGTH
                seconds = chance.choice(SECONDS) if is_free else None
                heard = read_sound(Question(audio_seconds=seconds), source, task)
                key += f" {heard.size}"
            try:
                specs = [TraceSpec.of(config)]
                length = config.sequence_length
                traces = trace_all(
                    source,
                    task,
                    length,
                    card,
                    specs,
                    pictures=heard,
                    teacher=taught_by,
                    server=tracers,
                )
                estimator = Estimator(traces, card, memory_budget_bytes=budget_bytes)
                estimate = estimator.estimate(config)
            except AutotuneError as error:
                say(f"not predicted: {error}: {source.name} {shown(config)}")
                continue
            if estimate.is_bound:
                say(f"not predicted, no more than eagerly: {source.name} {shown(config)}")
                continue
            least_bytes = estimate.peak_device_bytes if options.capped else budget_bytes
            if least_bytes > budget_bytes:
                say(f"does not fit: {key}")
                continue
            spec = ProbeSpec(
                task=task,
                backend="cuda",
                memory_budget_bytes=least_bytes,
                max_seconds=0.1,
                pictures=heard,
                teacher=taught_by,
            )
            seen = Prober(OneCard(probes), table, source, spec).measure(config)
            records.add(
                key,
                model=source.name,
                num_layers=options.layers,
                capped_at_prediction=options.capped,
                prediction=estimate.to_dict(least_bytes),
                measurement=seen.to_dict(),
            )
            print(f"{line(estimate, seen)}: {source.name} {shown(config)}", flush=True)


if __name__ == "__main__":
    main()
