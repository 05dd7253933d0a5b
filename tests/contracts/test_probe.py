"""Real probes on the CPU, through the code that a GPU would run.

Bytes are compared with what is predicted for the same configuration. They differ by the batch: the
Trainer fetches the token ids of a step before it and accelerate one batch more, the prediction knows
those of one micro-batch.

DIFFERENCES of test_trace_is_the_trainer.py hold here too: eager attention, no cuBLAS, no buffers of
CUDA's kernels. And PEFT's 4-bit layers ask whether CUDA's autocast is on and cast by themselves where
it is not: they get the answer that they would get on a GPU.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import gc
import json
import math
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import here
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import GIB, MIB
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.space.adapters import read_peft
from autotune.space.config import TrainConfig
from autotune.space.media import Media
from autotune.space.teacher import Teacher
from autotune.worker.build import model as models
from autotune.worker.client import isolate
from autotune.worker.probe import checks, confirm, memory, training
from autotune.worker.probe import run as probe_module
from autotune.worker.probe.paging import require_host_memory
from autotune.worker.probe.run import probe
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.cuda import Device

pytestmark = [
    # PEFT 0.21 asks Transformers 5.23 by the old names of activation checkpointing.
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
]

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
SEQUENCE_LENGTH = 64
FULL = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    sequence_length=SEQUENCE_LENGTH,
    precision="fp32",
    optimizer="adamw_torch_fused",
    attention="eager",
)
LORA = dataclasses.replace(
    FULL, method="lora", precision="bf16-true", lora_rank=4, lora_targets="all-linear"
)
QLORA = dataclasses.replace(
    LORA, method="qlora", precision="bf16-autocast", quantization="nf4-double"
)
PROMPT = dataclasses.replace(FULL, precision="bf16-autocast", num_virtual_tokens=6)
CONFIGS = {
    "full": FULL,
    "full every 2nd layer": dataclasses.replace(FULL, activation_checkpointing=2),
    "full bf16-mixed": dataclasses.replace(FULL, precision="bf16-mixed"),
    "full one micro-step": dataclasses.replace(FULL, gradient_accumulation_steps=1),
    "full eight micro-steps": dataclasses.replace(FULL, gradient_accumulation_steps=8),
    "full 8-bit": dataclasses.replace(FULL, optimizer="adamw_bnb_8bit"),
    "full grouped": dataclasses.replace(FULL, batching="grouped"),
    "full by tokens": dataclasses.replace(FULL, batching="by-tokens", micro_batch_size=1),
    "lora": LORA,
    "lora checkpointed": dataclasses.replace(LORA, activation_checkpointing=1),
    "qlora": QLORA,
    "qlora checkpointed": dataclasses.replace(QLORA, activation_checkpointing=1),
    "qlora fp4": dataclasses.replace(QLORA, quantization="fp4"),
    "qlora int8": dataclasses.replace(QLORA, quantization="int8"),
    "vera": dataclasses.replace(LORA, method="vera", precision="bf16-autocast"),
    "prompt tuning": dataclasses.replace(PROMPT, method="prompt_tuning"),
    "prefix tuning": dataclasses.replace(PROMPT, method="prefix_tuning"),
    "Llama-Adapter on nf4": dataclasses.replace(
        PROMPT, method="adaption_prompt", quantization="nf4"
    ),
    "trainable tokens": dataclasses.replace(PROMPT, method="trainable_tokens"),
    "peft": dataclasses.replace(
        PROMPT,
        method="peft",
        num_virtual_tokens=None,
        peft=read_peft(
            {"peft_type": "LORA", "r": 4, "bias": "all", "target_modules": "all-linear"}
        ),
    ),
}
SPEC = ProbeSpec(
    task="causal-lm",
    backend="cpu",
    memory_budget_bytes=GIB,
    max_seconds=0.1,
    target_spread=0.0,
    max_steps=1,  # beside the two whose memory is watched
)


def run(config: TrainConfig = FULL, model: dict[str, Any] = MODEL, **spec: Any) -> Measurement:
    return probe(model, config, dataclasses.replace(SPEC, **spec))


@pytest.fixture(scope="module", autouse=True)
def _quiet_and_steady() -> Iterator[None]:
    """One thread, as in a probe's own process; no chatter."""
    verbosity, num_threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(num_threads)
    transformers.logging.set_verbosity(verbosity)


def estimated(
    config: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any] | None = None,
    task: str = "causal-lm",
    sees: Media | None = None,
    teacher: Teacher | None = None,
) -> Estimate:
    """Return what is predicted. `model` None: MODEL, which a test may have replaced."""
    monkeypatch.setattr(trace_module, "hidden_buffers", lambda *_: ())
    spec = TraceSpec.of(config)
    answer = trace_module.trace_step(
        models.load_config(model or MODEL),
        task,
        spec,
        sequence_length=config.sequence_length,
        device=Device(compute_capability=(8, 9), cublas_workspace_bytes=0),
        sees=sees,
        teacher=None if teacher is None else models.load_config(teacher.config),
    )
    traces = {spec: Trace(json.loads(json.dumps(answer)))}
    return Estimator(traces, find_gpu("rtx-4070"), memory_budget_bytes=GIB).estimate(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_probe_needs_what_was_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: is_enabled("cpu"))
    measured = run(config)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.fits
    assert measured.loss_is_finite
    predicted = estimated(config, monkeypatch)
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_reserved_bytes is not None
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    # Token ids and labels, and a mask where there is padding.
    num_tensors = 2 if config.batching == "packed" else 3
    batch_bytes = num_tensors * config.micro_batch_size * SEQUENCE_LENGTH * 8
    if config.quantization != "none":
        # bitsandbytes' kernels, and what they return, are others on a CPU.
        assert abs(difference) < 0.01 * predicted.peak_allocated_bytes
    else:
        # All micro-batches of a step are there as it begins; a probe has two at most.
        unseen = max(config.gradient_accumulation_steps - 2, 0)
        assert -unseen * batch_bytes <= difference <= 3 * batch_bytes
    assert abs(measured.peak_reserved_bytes - predicted.peak_reserved_bytes) <= 2 * MIB
    assert measured.nontorch_bytes == 0


PLANS = {
    "recompute": dataclasses.replace(
        FULL, activation_checkpointing=1, checkpoint_plan="recompute", checkpoint_layers=3
    ),
    "products": dataclasses.replace(
        FULL, activation_checkpointing=1, checkpoint_plan="products", checkpoint_layers=2
    ),
    "recompute-products": dataclasses.replace(
        LORA, activation_checkpointing=1, checkpoint_plan="recompute-products", checkpoint_layers=1
    ),
}
QLORA_SETTINGS = {
    name: getattr(QLORA, name)
    for name in ("method", "precision", "quantization", "lora_rank", "lora_targets")
}
WIDE = {**MODEL, "hidden_size": 256, "num_hidden_layers": 4}
"""A model with products that a plan of checkpointing keeps."""


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_checkpointing_needs_what_was_predicted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PLANS[name]
    measured = run(config, WIDE)
    assert (measured.outcome, measured.message) == ("ok", "")
    predicted = estimated(config, monkeypatch, WIDE)
    assert measured.peak_allocated_bytes is not None
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    assert 0 <= difference <= 3 * 2 * config.micro_batch_size * SEQUENCE_LENGTH * 8
    assert measured.peak_reserved_bytes is not None
    assert abs(measured.peak_reserved_bytes - predicted.peak_reserved_bytes) <= 2 * MIB


def test_a_plan_of_checkpointing_is_confirmed() -> None:
    """With an evaluation, which keeps nothing, and a checkpoint."""
    measured = run(PLANS["recompute-products"], WIDE, confirm_steps=2)
    assert (measured.outcome, measured.message) == ("ok", "")
    qlora = dataclasses.replace(PLANS["products"], **QLORA_SETTINGS)
    assert run(qlora, WIDE).outcome == "ok"


def test_what_a_measurement_says() -> None:
    config = CONFIGS["full eight micro-steps"]
    measured = run(config, max_seconds=100.0, max_steps=3)
    assert measured.num_steps == 3
    assert measured.spread is not None
    assert measured.spread >= 0
    assert measured.micro_step_seconds is not None
    assert measured.optimizer_step_seconds is not None
    assert measured.optimizer_step_seconds < measured.micro_step_seconds
    assert measured.fingerprint.device
    assert measured.fingerprint.driver == measured.fingerprint.cuda == ""
    versions = dict(measured.fingerprint.versions)
    # Its own name for itself may say what CUDA it was built for, where the package does not.
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["transformers"] == transformers.__version__
    assert measurement_from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


def test_the_trainer_runs_with_what_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-steps stand for eight; the optimizer steps are as many as were asked for."""
    calls: list[Any] = []
    training_step = transformers.Trainer.training_step

    def counted(self: Any, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        calls.append((self.args, {name: tuple(t.shape) for name, t in inputs.items()}))
        return training_step(self, model, inputs, *args)

    monkeypatch.setattr(transformers.Trainer, "training_step", counted)
    run(CONFIGS["full eight micro-steps"], max_seconds=100.0, max_steps=3)
    assert len(calls) == 2 * (memory.NUM_TRACKED_STEPS + 3)
    arguments, shapes = calls[0]
    assert (arguments.optim, arguments.max_grad_norm) == (FULL.optimizer, 1.0)
    assert shapes == {"input_ids": (2, SEQUENCE_LENGTH), "labels": (2, SEQUENCE_LENGTH)}


@pytest.mark.parametrize(
    ("batching", "micro_batch_size", "shape", "num_empty"),
    [
        ("packed", 2, (2, SEQUENCE_LENGTH), None),
        ("padded", 2, (2, SEQUENCE_LENGTH), 2),
        ("grouped", 1, (1, SEQUENCE_LENGTH), None),
        ("padding-free", 2, (1, 2 * SEQUENCE_LENGTH), None),
        ("by-tokens", 2, (2, SEQUENCE_LENGTH), 2),
        ("by-tokens", 1, (1, SEQUENCE_LENGTH), 1),
    ],
)
def test_a_batch_is_filled_as_it_was_chosen(
    batching: str,
    micro_batch_size: int,
    shape: tuple[int, int],
    num_empty: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: there is no mask, or nothing in it."""
    seen: list[dict[str, Any]] = []
    training_step = transformers.Trainer.training_step

    def watched(self: Any, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        seen.append(dict(inputs))
        return training_step(self, model, inputs, *args)

    monkeypatch.setattr(transformers.Trainer, "training_step", watched)
    config = dataclasses.replace(FULL, batching=batching, micro_batch_size=micro_batch_size)
    assert run(config).outcome == "ok"
    for inputs in seen:
        assert inputs["input_ids"].shape == inputs["labels"].shape == shape
        mask = inputs.get("attention_mask")
        assert (None if mask is None else int((mask == 0).sum())) == num_empty
        if num_empty:
            assert (inputs["labels"] == -100).equal(mask == 0)
        # FlashAttention is told where the samples begin.
        assert ("cu_seq_lens_q" in inputs) == (batching == "padding-free")


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("sequence-classification", {"model_type": "bert"}),
        ("masked-lm", {"model_type": "bert"}),
        ("sequence-classification", {"num_key_value_heads": 2}),
        (
            "seq2seq-lm",
            {
                "model_type": "t5",
                "d_model": 64,
                "d_kv": 16,
                "d_ff": 128,
                "num_layers": 2,
                "num_heads": 4,
                "decoder_start_token_id": 0,
            },
        ),
    ],
)
def test_other_tasks(task: str, model: dict[str, Any]) -> None:
    config = dataclasses.replace(
        LORA, activation_checkpointing=1, micro_batch_size=3, precision="bf16-autocast"
    )
    measured = run(config, {**MODEL, **model}, task=task)
    assert (measured.outcome, measured.message) == ("ok", "")


@pytest.mark.parametrize("share", [0.2, 0.6, 0.98])
def test_out_of_memory_happens(share: float) -> None:
    """While the model is built, in the first step, and in the second."""
    whole = run()
    assert whole.peak_allocated_bytes is not None
    budget = int(share * whole.peak_allocated_bytes)
    measured = run(memory_budget_bytes=budget)
    assert measured.outcome == "oom"
    assert not measured.fits
    assert "out of memory" in measured.message
    assert measured.excess_bytes is not None
    assert 0 < measured.excess_bytes <= whole.peak_allocated_bytes - budget + MIB
    assert measured.tokens_per_second is None
    assert gc.isenabled()


def test_a_budget_of_the_predicted_size_is_enough() -> None:
    whole = run()
    assert whole.peak_reserved_bytes is not None
    measured = run(memory_budget_bytes=whole.peak_reserved_bytes)
    assert measured.fits
    assert measured.peak_device_bytes == whole.peak_reserved_bytes


def test_a_hopeless_probe_is_stopped() -> None:
    lines: list[dict[str, Any]] = []
    spec = dataclasses.replace(SPEC, max_seconds=100.0, max_steps=50)
    measured = probe(
        MODEL,
        FULL,
        spec,
        lines.append,
        stop_reason=lambda: "at most 61 % of the best" if len(lines) == 2 else "",
    )
    assert measured.outcome == "slow"
    assert measured.message == "stopped after 4 steps: at most 61 % of the best"
    assert (measured.num_steps, measured.fits) == (2, False)
    assert [line["step"] for line in lines] == [1, 2]
    at_most = [line["tokens_per_second_at_most"] for line in lines]
    assert measured.tokens_per_second is not None
    assert at_most[1] >= at_most[0] >= 0
    assert at_most[1] >= measured.tokens_per_second


def test_a_probe_that_is_done_is_not_stopped() -> None:
    measured = probe(MODEL, FULL, dataclasses.replace(SPEC, max_steps=1), stop_reason=lambda: "why")
    assert (measured.outcome, measured.num_steps) == ("ok", 1)


def test_timing_ends_when_it_is_precise_enough() -> None:
    measured = run(target_spread=1e9, max_steps=20, max_seconds=100.0)
    assert (measured.outcome, measured.num_steps) == ("ok", 3)


def skip_steps(monkeypatch: pytest.MonkeyPatch, num_skipped: int) -> None:
    """As accelerate's optimizer does while the gradients overflow fp16 (a CPU has no fp16 to train in)."""
    step = AcceleratedOptimizer.step
    num_steps = 0

    def some(self: Any, closure: Any = None) -> None:
        nonlocal num_steps
        num_steps += 1
        self._is_overflow = num_steps <= num_skipped
        if not self._is_overflow:
            step(self, closure)

    monkeypatch.setattr(AcceleratedOptimizer, "step", some)


def test_steps_that_are_skipped_are_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run()
    skip_steps(monkeypatch, 3)
    measured = run()
    assert measured.outcome == "ok"
    # With what the optimizer keeps.
    assert measured.peak_allocated_bytes == whole.peak_allocated_bytes


def test_a_checkpoint_waits_for_the_optimizers_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_states: list[int] = []
    monkeypatch.setattr(
        confirm, "save_checkpoint", lambda trainer: num_states.append(len(trainer.optimizer.state))
    )
    skip_steps(monkeypatch, 3)
    assert confirmed(FULL, tmp_path).num_steps == 3
    (num_kept,) = num_states
    assert num_kept > 0


def test_gradients_that_are_never_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_steps(monkeypatch, 1000)
    measured = run()
    assert (measured.outcome, measured.loss_is_finite) == ("invalid", False)
    assert measured.message == "the gradients of 8 steps are not finite in fp16"


def test_accelerate_says_which_steps_it_skips() -> None:
    """What the probe goes by: a fused optimizer skips by itself, and makes its state."""
    for fused, is_skipped in ((False, True), (True, False)):
        weight = nn.Parameter(torch.ones(4))
        adam = torch.optim.AdamW([weight], fused=fused)
        Accelerator(cpu=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(weight.sum())
        optimizer = AcceleratedOptimizer(adam, scaler=scaler)
        for gradient, finite in ((math.inf, False), (1.0, True)):
            weight.grad = torch.full((4,), gradient)
            optimizer.step()
            assert optimizer.step_was_skipped is (is_skipped and not finite)
            assert bool(adam.state) is (finite or not is_skipped)
        assert weight.mean() < 1


# What goes wrong, and how the probe is told.


def lose_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a wrapper would whose checkpointing flag never reaches the layers."""
    monkeypatch.setattr(
        transformers.PreTrainedModel, "activation_checkpointing_enable", lambda self, **_: None
    )


def checkpoint_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    enable = transformers.PreTrainedModel.activation_checkpointing_enable
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "activation_checkpointing_enable",
        lambda self, every_n_layers=1, **rest: enable(self, every_n_layers=1, **rest),
    )


def change_built_model(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    build = probe_module.build

    def changed(*args: Any) -> Any:
        model = build(*args)
        change(model)
        return model

    monkeypatch.setattr(probe_module, "build", changed)


def lose_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bf16(config: TrainConfig, fields: Any) -> dict[str, object]:
        return {**training_arguments(config, fields), "bf16": False}

    training_arguments = training.training_arguments
    monkeypatch.setattr(training, "training_arguments", without_bf16)


def use_another_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_sgd(config: TrainConfig, fields: Any) -> dict[str, object]:
        return {**training_arguments(config, fields), "optim": "sgd"}

    training_arguments = training.training_arguments
    monkeypatch.setattr(training, "training_arguments", with_sgd)


def freeze(model: nn.Module) -> None:
    model.requires_grad_(False)


def halve_adapter(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


def spoil_weights(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))


def pretend_sdpa(model: Any) -> None:
    model.config._attn_implementation = "sdpa"


def forget_the_loss(model: Any) -> None:
    forward = model.forward

    # The Trainer drops what the signature does not name.
    @functools.wraps(forward)
    def without_labels(*args: Any, **inputs: Any) -> Any:
        return forward(*args, **{**inputs, "labels": None})

    model.forward = without_labels


def silence_gradients(model: Any) -> None:
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)


BUILT = {
    "frozen": (FULL, freeze, "no parameter of the model is trainable"),
    "adapter dtype": (LORA, halve_adapter, "the adapter is in bfloat16, not in float32"),
    "base dtype": (
        dataclasses.replace(LORA, precision="bf16-autocast"),
        lambda model: model.float(),
        "frozen weights are in float32, not in bfloat16",
    ),
    "NaN": (FULL, spoil_weights, "loss is NaN"),
    "attention": (FULL, pretend_sdpa, "attention is sdpa, not eager"),
    "no loss": (FULL, forget_the_loss, "The model did not return a loss"),
    "no gradient": (FULL, silence_gradients, "tensors gets a gradient"),
}


def test_what_a_model_freezes_itself_is_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """ERNIE 4.5's routers have a correction in float32 that no gradient reaches."""
    correction = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    change_built_model(monkeypatch, lambda model: model.register_parameter("fixed", correction))
    assert run(dataclasses.replace(FULL, precision="bf16-true")).outcome == "ok"


@pytest.mark.parametrize("name", BUILT)
def test_a_model_that_is_not_as_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, change, part = BUILT[name]
    change_built_model(monkeypatch, change)
    measured = run(config)
    assert measured.outcome == "invalid"
    assert part in measured.message
    assert measured.loss_is_finite is (False if name == "NaN" else None)
    assert not measured.fits


@pytest.mark.parametrize(
    ("name", "break_it", "part"),
    [
        ("qlora checkpointed", lose_checkpointing, "active on 0 of 2 layers, not on 2"),
        ("full every 2nd layer", checkpoint_every_layer, "active on 2 of 2 layers, not on 1"),
        ("full bf16-mixed", lose_autocast, "autocast is None, not torch.bfloat16"),
        ("lora", use_another_optimizer, "optimizer's class is SGD, not AdamW"),
    ],
)
def test_a_setting_that_is_lost(
    name: str, break_it: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    measured = run(CONFIGS[name])
    assert measured.outcome == "invalid"
    assert part in measured.message


@pytest.mark.parametrize(
    ("name", "other", "part"),
    [
        ("recompute", ("recompute", 2), "active on 2 of 4 layers, not on the 3 that it is for"),
        ("recompute", ("products", 3), "layer 0 keeps products, not inputs"),
        ("products", ("recompute", 2), "layer 0 keeps inputs, not products"),
        ("recompute-products", ("recompute-products", 2), "layer 1 keeps inputs, not products"),
        ("recompute-products", None, "active on 0 of 4 layers, not on the 4"),
    ],
)
def test_a_plan_of_checkpointing_that_is_another(
    name: str, other: tuple[str, int] | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PLANS[name]
    enable = models.enable_checkpointing

    def another(model: Any, spec: TraceSpec) -> None:
        if other is not None:
            changed = {"checkpoint_plan": other[0], "checkpoint_layers": other[1]}
            enable(model, dataclasses.replace(spec, **changed))

    monkeypatch.setattr(models, "enable_checkpointing", another)
    measured = run(config, WIDE)
    assert measured.outcome == "invalid"
    assert part in measured.message


@pytest.mark.parametrize("num_decoder_layers", [4, 2])
def test_a_plan_of_checkpointing_is_for_two_stacks_of_as_many_layers(
    num_decoder_layers: int,
) -> None:
    two_stacks = {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 4,
        "num_decoder_layers": num_decoder_layers,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    measured = run(PLANS["recompute-products"], {**WIDE, **two_stacks}, task="seq2seq-lm")
    if num_decoder_layers == 4:
        assert measured.outcome == "ok", measured.message
    else:
        assert measured.outcome == "invalid"
        assert (
            "6 layers that can be checkpointed, of 4 each in an encoder and a decoder"
            in measured.message
        )


@pytest.mark.parametrize("how", ["1", "2", "plan"])
def test_layers_that_see_images_do_not_run_on_text(how: str) -> None:
    text = {name: MODEL[name] for name in MODEL if name != "model_type"}
    eyes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 28,
        "patch_size": 14,
    }
    model = {
        "model_type": "gemma3",
        "text_config": {**text, "head_dim": 32},
        "vision_config": eyes,
        "mm_tokens_per_image": 4,
    }
    of_plan = dataclasses.replace(PLANS["recompute"], checkpoint_layers=1)
    every = 1 if how == "plan" else int(how)
    config = of_plan if how == "plan" else dataclasses.replace(FULL, activation_checkpointing=every)
    measured = run(config, model)
    assert (measured.outcome, measured.message) == ("ok", "")


@pytest.mark.parametrize(
    ("precision", "backend", "is_on", "said"),
    [
        ("fp32", "cuda", False, []),
        ("fp32", "cuda", True, ["TF32 is on"]),
        ("tf32", "cuda", True, []),
        ("tf32", "cuda", False, ["TF32 is off"]),
        # Products of 16 bits have no use for it, and a CPU has none.
        ("bf16-true", "cuda", True, []),
        ("bf16-autocast", "cuda", False, []),
        ("fp32", "cpu", True, []),
    ],
)
def test_products_of_float32_are_exact_unless_tf32_was_asked_for(
    precision: str, backend: str, is_on: bool, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_tf32_is_on", lambda: is_on)
    accelerator = SimpleNamespace(mixed_precision="no", scaler=None)
    config = dataclasses.replace(FULL, precision=precision)
    assert checks.check_precision(accelerator, config, backend) == said


def test_checkpointing_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def enable(model: Any) -> None:
        model.activation_checkpointing_enable()

    change_built_model(monkeypatch, enable)
    assert "2 layers are checkpointed" in run().message


def test_a_head_that_trains_beside_an_adapter_is_none_of_it() -> None:
    """RoBERTa's is in the base's dtype, and larger than an adapter of rank 1."""
    encoder = models.load_config({**MODEL, "model_type": "roberta", "num_labels": 2})
    config = dataclasses.replace(LORA, lora_rank=1, lora_targets="attention")
    device = torch.device("cpu")
    model = probe_module.build(encoder, "sequence-classification", config, device)
    assert checks.check_model(model, config) == []


@pytest.mark.parametrize(
    ("quantization", "part"),
    [("nf4", "quantisation is {('nf4', True,"), ("none", "14 layers are quantised")],
)
def test_quantisation_that_is_another(quantization: str, part: str) -> None:
    device = torch.device("cpu")
    model = probe_module.build(models.load_config(MODEL), "causal-lm", QLORA, device)
    assert checks.check_model(model, QLORA) == []
    other = dataclasses.replace(QLORA, quantization=quantization)
    assert part in "; ".join(checks.check_model(model, other))


def test_paging_and_bits_are_looked_at() -> None:
    import bitsandbytes

    weight = nn.Parameter(torch.ones(8))
    optimizer = bitsandbytes.optim.AdamW([weight], optim_bits=8, is_paged=True)

    def complaints(name: str) -> str:
        config = dataclasses.replace(FULL, optimizer=name)
        return "; ".join(checks.check_optimizer(optimizer, config))

    assert complaints("paged_adamw_8bit") == ""
    assert complaints("adamw_bnb_8bit") == "the optimizer's paging is True, not False"
    assert complaints("paged_adamw_32bit") == "the optimizer's bits is 8, not 32"
    assert "class is AdamW, not Lion" in complaints("paged_lion_8bit")
    assert "library is bitsandbytes, not torch" in complaints("adamw_torch_fused")


def test_what_deepspeed_keeps_on_the_host_must_find_room_there() -> None:
    config = dataclasses.replace(FULL, parallelism="zero3-offload", optimizer="adamw_torch_fused")
    model = nn.Linear(1024, 1024, bias=False)
    with pytest.raises(MemoryError, match=r"^zero3-offload keeps on the host 16\.0 MiB of state"):
        require_host_memory(model, config, 15 * MIB)
    require_host_memory(model, config, 16 * MIB)
    require_host_memory(model, dataclasses.replace(config, parallelism="none"), 0)


def test_the_optimizer_in_host_memory_is_deepspeeds() -> None:
    config = dataclasses.replace(FULL, parallelism="zero2-offload", optimizer="adamw_torch_fused")
    in_its_place = type("DeepSpeedCPUAdam", (), {"__module__": "deepspeed.ops.adam.cpu_adam"})()
    for fused in (True, None):  # The groups stay as they were made.
        in_its_place.param_groups = [{"fused": fused}]
        assert checks.check_optimizer(in_its_place, config) == []
    own = torch.optim.AdamW([nn.Parameter(torch.ones(8))], fused=True)
    assert "class is AdamW, not DeepSpeedCPUAdam" in checks.check_optimizer(own, config)[0]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"precision": "fp16-mixed"}, "fp16-mixed needs a CUDA device"),
        ({"activation_checkpointing": 1, "activation_offloading": True}, "offloading needs"),
        (
            {"activation_checkpointing": 1, "checkpoint_plan": "offload", "checkpoint_layers": 1},
            "offloading needs a CUDA device",
        ),
        ({"optimizer": "adalomo", "gradient_accumulation_steps": 1}, "adalomo needs a CUDA device"),
        ({"optimizer": "adamw_torch_4bit"}, "adamw_torch_4bit needs a CUDA device"),
    ],
)
def test_what_a_cpu_cannot_do_is_said(change: dict[str, Any], part: str) -> None:
    measured = run(dataclasses.replace(FULL, **change))
    assert measured.outcome == "invalid"
    assert part in measured.message


def test_an_unknown_architecture_is_invalid() -> None:
    measured = run(model={"model_type": "of-tomorrow"})
    assert measured.outcome == "invalid"
    assert "of-tomorrow" in measured.message


def test_what_is_neither_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(probe_module, "build", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run()
    assert gc.isenabled()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_way_to_run_out_of_memory(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(probe_module, "build", out_of_memory)
    measured = run()
    assert (measured.outcome, measured.excess_bytes) == ("oom", None)


def test_the_worker_answers_line_by_line() -> None:
    spec = dataclasses.asdict(dataclasses.replace(SPEC, max_steps=3, max_seconds=100.0))
    request = {"config": MODEL, "train_config": FULL.to_dict(), "spec": spec}
    end = here.workers.run("probe", request, deadline_seconds=120)
    assert end.how == "ok", end.stderr_tail
    *progress, last = end.answers
    measured = measurement_from_dict(last["measurement"])
    assert measured.outcome == "ok"
    assert [line["step"] for line in progress] == list(range(1, measured.num_steps + 1))
    assert all(line["tokens_per_second_at_most"] > 0 for line in progress)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_a_card_that_torch_cannot_use_is_said() -> None:
    end = isolate.run("fingerprint", {"backend": "cuda"}, deadline_seconds=120)
    assert end.how == "ok", end.stderr_tail
    (answer,) = end.answers
    assert set(answer) == {"unusable"}
    assert "CUDA" in answer["unusable"] or "NVIDIA" in answer["unusable"]


# A confirmation: longer, whole, with an evaluation and a checkpoint.


def confirmed(
    config: TrainConfig, folder: Path, *, num_steps: int = 3, budget_bytes: int = GIB
) -> Measurement:
    spec = dataclasses.replace(SPEC, confirm_steps=num_steps, memory_budget_bytes=budget_bytes)
    return probe(MODEL, config, spec, folder=str(folder))


@pytest.mark.parametrize("name", ["full eight micro-steps", "lora checkpointed", "qlora"])
def test_a_confirmation_trains_evaluates_and_saves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS[name]
    trainer_class = transformers.Trainer
    done: list[str] = []
    batches: list[int] = []
    saved_bytes: dict[str, int] = {}
    needed_bytes: list[int] = []
    training_step, prediction_step = trainer_class.training_step, trainer_class.prediction_step
    save_checkpoint = trainer_class._save_checkpoint

    def train(self: Any, *arguments: Any) -> torch.Tensor:
        done.append("train")
        return training_step(self, *arguments)

    def predict(self: Any, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        done.append("evaluate")
        assert not model.training
        batches.append(len(inputs["input_ids"]))
        return prediction_step(self, model, inputs, *arguments, **named)

    def save(self: Any, *arguments: Any, **named: Any) -> None:
        done.append("save")
        save_checkpoint(self, *arguments, **named)
        needed_bytes.append(confirm.checkpoint_bytes(self.model, self.optimizer))
        for file in tmp_path.rglob("checkpoint-*/*"):
            saved_bytes[file.name] = file.stat().st_size

    monkeypatch.setattr(trainer_class, "training_step", train)
    monkeypatch.setattr(trainer_class, "prediction_step", predict)
    monkeypatch.setattr(trainer_class, "_save_checkpoint", save)
    measured = confirmed(config, tmp_path)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.fits
    assert measured.num_steps == 3
    accumulation = config.gradient_accumulation_steps
    before = ["train"] * 2 * accumulation + ["evaluate"] * confirm.NUM_EVALUATION_BATCHES
    assert done == [*before, "save", *["train"] * 3 * accumulation]
    assert set(batches) == {config.micro_batch_size}
    weights = "model" if config.method == "full" else "adapter_model"
    assert {"optimizer.pt", "scheduler.pt", f"{weights}.safetensors"} <= set(saved_bytes)
    # What was asked of the disk is what was written, and a few headers.
    tensors_bytes = saved_bytes["optimizer.pt"] + saved_bytes[f"{weights}.safetensors"]
    assert tensors_bytes == pytest.approx(needed_bytes[0], rel=0.25)
    assert not list(tmp_path.iterdir())


LENGTHS = (4, 20, 36)


def varied(config: TrainConfig, folder: Path, model: dict[str, Any] = MODEL, **spec: Any) -> Any:
    """Confirmed over 3 steps, and 8 more of these lengths."""
    wanted = dataclasses.replace(SPEC, confirm_steps=3, varied_steps=8, lengths=LENGTHS, **spec)
    return probe(model, config, wanted, folder=str(folder))


def watch_steps(monkeypatch: pytest.MonkeyPatch, look: Callable[[Any, Any], None]) -> None:
    """`look` gets the Trainer and the batch of each micro-step."""
    training_step = transformers.Trainer.training_step

    def watched(self: Any, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        look(self, inputs)
        return training_step(self, model, inputs, *args)

    monkeypatch.setattr(transformers.Trainer, "training_step", watched)


@pytest.mark.parametrize("batching", ["padded", "grouped", "padding-free"])
def test_a_confirmation_goes_on_with_varied_lengths(
    batching: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(FULL, batching=batching)
    batches: list[tuple[int, ...]] = []
    has_state: list[bool] = []

    def look(trainer: Any, inputs: Any) -> None:
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask", torch.ones_like(ids))
        kept = tuple(mask.sum(dim=1).tolist())
        assert max(kept) >= ids.shape[1] - 1
        batches.append((ids.shape[1], *sorted(kept)))
        has_state.append(bool(trainer.optimizer.state))

    watch_steps(monkeypatch, look)
    measured = varied(config, tmp_path)
    assert (measured.outcome, measured.message, measured.fits) == ("ok", "", True)
    assert (measured.num_steps, measured.num_varied_steps) == (3, 8)
    at_full_length, further = batches[: 5 * 2], batches[5 * 2 :]
    per_batch = 2 * SEQUENCE_LENGTH if batching == "padding-free" else SEQUENCE_LENGTH
    assert {tokens for tokens, *_ in at_full_length} == {per_batch}
    # 8 steps of two micro-batches, begun twice as a run is: without the state of an optimizer.
    assert len(further) == 8 * 2
    assert has_state == [False] * 2 + [True] * 8 + 2 * ([False] * 2 + [True] * 6)
    tokens = [tokens for tokens, *_ in further]
    assert len(set(tokens)) > 5
    assert max(kept for _, *of_batch in further for kept in of_batch) >= LENGTHS[-1]
    if batching == "grouped":
        # Mega-batches of 4 / 4 steps, the longest first (transformers trainer_pt_utils.py).
        parts = [tokens[start : start + 2] for start in range(0, 16, 2)]
        assert all(sorted(part, reverse=True) == part for part in parts)
    # Nobody counts a CPU's memory then.
    assert measured.varied_device_bytes is None
    assert measurement_from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


def test_varied_lengths_are_cut_by_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(FULL, batching="by-tokens", gradient_accumulation_steps=4)
    batches: list[tuple[int, int]] = []
    watch_steps(monkeypatch, lambda _, inputs: batches.append(inputs["input_ids"].shape))
    measured = varied(config, tmp_path)
    assert (measured.outcome, measured.message) == ("ok", "")
    at_full_length, further = batches[: 5 * 4], batches[5 * 4 :]
    assert set(at_full_length) == {(2, SEQUENCE_LENGTH)}
    assert sum(rows for rows, _ in further) == 8 * config.effective_batch_size
    assert 8 * 2 < len(further) < 8 * 4
    assert max(rows * length for rows, length in further) <= 2 * SEQUENCE_LENGTH
    assert max(rows for rows, _ in further) > 2


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
def test_varied_lengths_of_other_tasks(task: str, tmp_path: Path) -> None:
    config = dataclasses.replace(LORA, batching="padded", micro_batch_size=3)
    measured = varied(config, tmp_path, {**MODEL, "model_type": "bert"}, task=task)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.num_varied_steps == 8


def test_memory_that_runs_out_with_varied_lengths_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third of those steps, of their first run."""
    steps = iter(range(100))

    def look(trainer: Any, inputs: Any) -> None:
        if next(steps) == 5 * 2 + 2 * 2:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 24.00 GiB "
                "of which 1.00 MiB is free.\nMore of it"
            )

    watch_steps(monkeypatch, look)
    measured = varied(dataclasses.replace(FULL, batching="padded"), tmp_path)
    assert (measured.outcome, measured.num_varied_steps) == ("oom", 3)
    assert measured.is_in_pieces
    assert measured.message == (
        "fits at full length alone; with varied lengths memory is in pieces, and in step 3 of them: CUDA "
        "out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 "
        "MiB is free."
    )
    assert measured.excess_bytes == MIB


@pytest.mark.parametrize("method", ["evaluate", "_save_checkpoint"])
def test_memory_of_the_evaluation_and_of_the_checkpoint_counts(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = confirmed(FULL, tmp_path)
    assert whole.peak_reserved_bytes is not None
    original = getattr(transformers.Trainer, method)

    def greedy(self: Any, *arguments: Any, **named: Any) -> Any:
        torch.empty(100 * MIB, dtype=torch.uint8)
        return original(self, *arguments, **named)

    monkeypatch.setattr(transformers.Trainer, method, greedy)
    seen = confirmed(FULL, tmp_path)
    assert seen.peak_allocated_bytes is not None
    assert seen.peak_allocated_bytes > 100 * MIB
    refused = confirmed(FULL, tmp_path, budget_bytes=whole.peak_reserved_bytes)
    assert refused.outcome == "oom"
    assert not list(tmp_path.iterdir())


def test_an_evaluation_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = {"eval_loss": float("nan")}
    monkeypatch.setattr(transformers.Trainer, "evaluate", lambda *_: nan)
    measured = confirmed(FULL, tmp_path)
    assert (measured.outcome, measured.loss_is_finite) == ("invalid", False)
    assert "evaluation" in measured.message


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * MIB))
    monkeypatch.setattr(
        transformers.Trainer, "_save_checkpoint", lambda *_, **__: pytest.fail("written")
    )
    measured = confirmed(FULL, tmp_path)
    assert measured.outcome == "full_disk"
    assert "2.0 MiB are free" in measured.message
    assert "TMPDIR" in measured.message
    assert not measured.fits


@pytest.mark.parametrize("limit_bytes", [MIB, 3 * MIB], ids=["weights", "optimizer"])
def test_a_disk_that_fills_is_an_outcome(limit_bytes: int, tmp_path: Path) -> None:
    """The weights take 2 MiB, the optimizer's state twice that; larger files are refused."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        measured = confirmed(FULL, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (measured.outcome, measured.fits) == ("full_disk", False)
    assert "it was full before the end" in measured.message
    assert not list(tmp_path.iterdir())


def test_what_the_operating_system_says_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "Kein Platz mehr")

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", full)
    assert confirmed(FULL, tmp_path).outcome == "full_disk"


def test_another_error_of_the_disk_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", refused)
    with pytest.raises(PermissionError):
        confirmed(FULL, tmp_path)
