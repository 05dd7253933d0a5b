"""The callback beside real training runs on the CPU, of Transformers' Trainer and of TRL's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import answers
import peft
import pytest
import torch
import transformers
from datasets import Dataset
from fake_nvml import fake_nvml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune.api import Result
from autotune.catalogue.installed import cpu_name
from autotune.common.units import GIB
from autotune.records.estimate import Estimate
from autotune.space.config import TrainConfig
from autotune.worker.given import callback
from autotune.worker.given.callback import WatchCallback
from autotune.worker.given.pace import NUM_WARM_UP_STEPS, Pace
from autotune.worker.probe.steps import CpuClock

pytestmark = [
    pytest.mark.worker,
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
LENGTH = 16
CONFIG = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    sequence_length=LENGTH,
    precision="fp32",
    optimizer="adamw_torch_fused",
)
NUM_STEPS = 12
WINDOW = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other make tiny steps long where the cores are shared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def model() -> Any:
    config = transformers.AutoConfig.from_pretrained(EXAMPLE)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def rows(length: int = LENGTH) -> list[dict[str, Any]]:
    ids = list(range(1, length + 1))
    return [{"input_ids": ids, "labels": ids} for _ in range(4 * NUM_STEPS)]


def result_of(step_seconds: float, device: str | None = None) -> Result:
    """Measured on this CPU: a step takes so long."""
    seen = answers.measurement(config=CONFIG, step_seconds=step_seconds)
    here = dataclasses.replace(seen.fingerprint, device=device or cpu_name())
    seen = dataclasses.replace(seen, fingerprint=here)
    best = answers.estimate(CONFIG)
    measured = answers.measured(best=seen, predicted=best)
    return Result(answer=answers.answer(best=best, measured=measured))


def trained(
    result: Result,
    folder: Path,
    *,
    callbacks: tuple[TrainerCallback, ...] = (),
    tolerance: float = 0.1,
    length: int = LENGTH,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> WatchCallback:
    """The callback after a run with the answer's own arguments."""
    values = {"max_steps": NUM_STEPS, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = result.training_arguments(output_dir=str(folder), **{**values, **overrides})
    watch = result.callback(tolerance=tolerance, window_steps=WINDOW, say=lambda _: None)
    trainer = Trainer(
        model=model().to(dtype),
        args=arguments,
        train_dataset=rows(length),
        eval_dataset=rows(length)[:4],
        callbacks=[watch, *callbacks],
    )
    trainer.train()
    assert not trainer.model._forward_pre_hooks
    return watch


def test_a_run_that_is_faster_than_planned_says_so_once(tmp_path: Path) -> None:
    watch = trained(result_of(step_seconds=100.0), tmp_path)
    begin, faster, end = watch.lines
    # 2 x 2 x 16 tokens in 100 s.
    assert "micro-batch 2 x 2" in begin
    assert "1 tokens/s" in begin
    assert "faster than measured: " in faster
    assert f"over the last {WINDOW} steps, 1 measured (+" in faster
    assert "Likely cause: the plan was too careful" in faster
    assert f"{NUM_STEPS} steps" in end
    assert "memory not checked (no CUDA device): not as planned" in end


@pytest.mark.parametrize(
    ("load", "cause"),
    [
        (0.5, "Likely cause: unknown; "),
        (1e4, "other programs are on the CPU: a load of 10000.0 on "),
    ],
)
def test_a_run_that_is_slower_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, cause: str
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    watch = trained(result_of(step_seconds=1e-6), tmp_path)
    (slower,) = [line for line in watch.lines if "slower than measured" in line]
    assert "64,000,000 measured (-100 %)" in slower
    assert cause in slower


class SlowToLoad(TrainerCallback):
    """Time goes by between two steps, as when batches are late."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(0.05)


def test_a_slow_loader_is_named(tmp_path: Path) -> None:
    watch = trained(result_of(step_seconds=1e-6), tmp_path, callbacks=(SlowToLoad(),))
    (slower,) = [line for line in watch.lines if "slower" in line]
    assert "Likely cause: data loading: " in slower


def test_other_batches_are_named(tmp_path: Path) -> None:
    watch = trained(result_of(step_seconds=1e-6), tmp_path, length=4 * LENGTH)
    (slower,) = [line for line in watch.lines if "slower" in line]
    assert "batches of up to 2 x 64 tokens, planned 2 x 16" in slower


def test_other_arguments_are_named_as_training_begins(tmp_path: Path) -> None:
    watch = trained(
        result_of(step_seconds=1e-6),
        tmp_path,
        dtype=torch.bfloat16,
        per_device_train_batch_size=4,
        optim="sgd",
        learning_rate=1e-3,
    )
    _, differs, slower, end = watch.lines
    assert differs == (
        "autotune: not as planned: the dtype of the weights is bfloat16 (planned float32), "
        "per_device_train_batch_size is 4 (planned 2), optim is sgd (planned adamw_torch_fused)"
    )
    assert "Likely cause: the dtype of the weights is bfloat16" in slower
    assert end.endswith("not as planned")


def test_a_run_as_planned_is_left_in_peace(tmp_path: Path) -> None:
    # However fast this machine is.
    watch = trained(result_of(step_seconds=1.0), tmp_path, tolerance=1e9)
    begin, end = watch.lines
    assert "the plan is" in begin
    assert end.endswith("as planned, as far as it was checked")


def test_a_loss_in_parts_is_put_into_the_model(tmp_path: Path) -> None:
    plain = result_of(step_seconds=1.0)
    config = dataclasses.replace(plain.config, chunked_loss=True)
    best = answers.estimate(config)
    seen = dataclasses.replace(plain.answer.measured.best, config=config)
    parted = Result(
        answer=answers.answer(best=best, measured=answers.measured(best=seen, predicted=best))
    )
    losses = []
    for result in (plain, parted):
        arguments = result.training_arguments(
            output_dir=str(tmp_path),
            max_steps=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model(),
            args=arguments,
            train_dataset=rows(),
            callbacks=[result.callback(tolerance=1e9, say=lambda _: None)],
        )
        losses.append(trainer.train().training_loss)
        parts = trainer.model.loss_function.__qualname__.startswith("chunk_loss")
        assert not parts, "the model is as it was once it is trained"
        assert trainer.model(torch.tensor([[1, 2]])).logits.shape[-1] == trainer.model.vocab_size
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(("fp16", "dtype"), [(True, torch.float32), (False, torch.float16)])
def test_what_trains_is_cast_where_float16_is_scaled(fp16: bool, dtype: torch.dtype) -> None:
    """GradScaler takes no gradients in 16 bits; what is frozen stays."""
    half = model().half().requires_grad_(False)
    half.lm_head.requires_grad_(True)
    assert list(callback._put_in(half, None, SimpleNamespace(fp16=fp16), CONFIG)) == []
    assert half.lm_head.weight.dtype == dtype
    assert half.model.norm.weight.dtype == torch.float16


def test_weights_are_updated_in_the_backward_pass(tmp_path: Path) -> None:
    """And the arguments are as they were once it is over; where they are for another run, it is refused."""
    plain = result_of(step_seconds=1.0)
    config = dataclasses.replace(
        plain.config, update_in_backward=True, gradient_accumulation_steps=1
    )
    best = answers.estimate(config)
    seen = dataclasses.replace(plain.answer.measured.best, config=config)
    updating = Result(
        answer=answers.answer(best=best, measured=answers.measured(best=seen, predicted=best))
    )

    class SeesGradients(TrainerCallback):
        num_left = -1

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            self.num_left = sum(weight.grad is not None for weight in model.parameters())

    sees = SeesGradients()
    watch = updating.callback(tolerance=1e9, say=lambda _: None)
    for accumulation in (1, 2):
        arguments = updating.training_arguments(
            output_dir=str(tmp_path),
            max_steps=1,
            gradient_accumulation_steps=accumulation,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model(), args=arguments, train_dataset=rows(), callbacks=[watch, sees]
        )
        if accumulation == 2:
            with pytest.raises(ValueError, match="gradient_accumulation_steps is above 1"):
                trainer.train()
        else:
            trainer.train()
            assert not any("not as planned" in line for line in watch.lines)
        assert arguments.max_grad_norm == 1.0
    assert sees.num_left == 0


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_plan_of_checkpointing_is_put_into_the_model(tmp_path: Path, has_adapter: bool) -> None:
    plain = result_of(step_seconds=1.0)
    config = dataclasses.replace(
        plain.config, activation_checkpointing=1, checkpoint_plan="recompute", checkpoint_layers=1
    )
    best = answers.estimate(config)
    seen = dataclasses.replace(plain.answer.measured.best, config=config)
    planned = Result(
        answer=answers.answer(best=best, measured=answers.measured(best=seen, predicted=best))
    )
    # Without the callback every layer is checkpointed, which takes less memory than the plan.
    assert planned.training_arguments(output_dir=str(tmp_path)).activation_checkpointing
    losses = []
    for result in (plain, planned):
        trained_model = model()
        if has_adapter:
            torch.manual_seed(0)
            lora = peft.LoraConfig(r=2, target_modules="all-linear")
            trained_model = peft.get_peft_model(trained_model, lora)
        watch = result.callback(tolerance=1e9, say=lambda _: None)
        seen_layers = SeesLayers()
        trainer = Trainer(
            model=trained_model,
            args=result.training_arguments(
                output_dir=str(tmp_path),
                max_steps=2,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=rows(),
            callbacks=[watch, seen_layers],
        )
        losses.append(trainer.train().training_loss)
        num_layers = trained_model.config.num_hidden_layers
        is_planned = result is planned
        assert seen_layers.is_planned == [is_planned, *[False] * (num_layers - 1)]
        assert not seen_layers.is_checkpointing
        assert not seen_layers.needs_gradients
        layers = layers_of(trained_model)
        assert not any("forward" in vars(layer) for layer in layers), "the model is as it was"
        # The plan is a full fine-tune.
        frozen = "not as planned: method is one that freezes most weights (planned full)"
        assert any(frozen in line for line in watch.lines) is has_adapter
        assert has_adapter or not any("not as planned" in line for line in watch.lines)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


class SeesLayers(TrainerCallback):
    """Looks at the layers in the course of training."""

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.is_planned = ["forward" in vars(layer) for layer in layers_of(model)]
        self.is_checkpointing = model.is_activation_checkpointing
        embeddings = model.get_input_embeddings()
        is_frozen = not embeddings.weight.requires_grad
        self.needs_gradients = is_frozen and embeddings(torch.tensor([[1]])).requires_grad


def layers_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


@pytest.mark.parametrize("is_measured", [False, True])
def test_another_device_is_not_compared(tmp_path: Path, is_measured: bool) -> None:
    result = result_of(step_seconds=1e-6, device="NVIDIA L4")
    if not is_measured:
        result = Result(answer=dataclasses.replace(result.answer, measured=None))
    watch = trained(result, tmp_path)
    _, end = watch.lines
    card = "NVIDIA L4" if is_measured else "NVIDIA RTX 4070"
    assert f"not checked: the plan is for {card}, and this is " in end


def test_a_step_after_an_evaluation_or_a_checkpoint_does_not_count(tmp_path: Path) -> None:
    now_and_then = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 6}
    watch = trained(result_of(step_seconds=1.0), tmp_path, save_strategy="steps", **now_and_then)
    # Of 12 steps neither the first three, nor those after steps 4, 6 and 8.
    assert watch._pace.num_tokens == 6 * CONFIG.tokens_per_step


def test_trl_trains_with_it(tmp_path: Path) -> None:
    """An SFTConfig of the user's, a dataset of texts, TRL's own preparation of them."""
    trl = pytest.importorskip("trl")
    config = dataclasses.replace(
        CONFIG, method="lora", trainer="trl-sft", lora_rank=4, lora_targets="all-linear"
    )
    answer = result_of(step_seconds=1e-6).answer
    measured = answer.measured
    assert measured is not None
    seen = dataclasses.replace(measured.best, config=config)
    best = dataclasses.replace(answer.best, config=config)
    measured = dataclasses.replace(measured, best=seen, predicted=best)
    result = Result(answer=dataclasses.replace(answer, best=best, measured=measured))
    mine = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=NUM_STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    words = [f"w{number}" for number in range(510)]
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", *words])}
    plain = Tokenizer(WordLevel(ids, unk_token="w0"))
    plain.pre_tokenizer = WhitespaceSplit()
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>"
    )
    watch = result.callback(window_steps=WINDOW, say=lambda _: None)
    trainer = trl.SFTTrainer(
        model=model(),
        args=result.apply(mine),
        train_dataset=Dataset.from_dict({"text": [" ".join(words)] * 4}),
        processing_class=tokens,
        peft_config=result.lora_config(),
        callbacks=[watch],
    )
    trainer.train()
    # 4 texts of 510 words and an end, as one stream cut into blocks.
    assert len(trainer.train_dataset) == 4 * 511 // LENGTH + 1
    begin, slower, end = watch.lines
    assert "the plan is" in begin
    assert "slower than measured" in slower
    assert "batches" not in slower
    assert f"{NUM_STEPS} steps" in end
    assert watch._largest_batch == (2, LENGTH)


class Card:
    """The counters of a card that is not here, and a run on it that is told each event."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        fallback: dict[str, Any] | None = None,
        predicted: Estimate | None = None,
    ) -> None:
        self.peak_gib = 3.0
        self.free_gib = 2.0
        self.num_retries = 0
        for name, fake in {
            "max_memory_reserved": lambda _: int(self.peak_gib * GIB),
            "memory_reserved": lambda _: int(self.peak_gib * GIB),
            "mem_get_info": lambda _: (int(self.free_gib * GIB), 12 * GIB),
            "memory_stats": lambda _: {"num_alloc_retries": self.num_retries},
            "get_device_name": lambda _: "NVIDIA L4",
            "synchronize": lambda _: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr("autotune.worker.given.callback.CudaClock", CpuClock)
        result = result_of(step_seconds=1e-9, device="NVIDIA L4")
        measured = result.answer.measured
        assert measured is not None
        assert measured.best.peak_reserved_bytes == 9 * GIB
        assert measured.best.nontorch_bytes == GIB
        if fallback:
            config = dataclasses.replace(result.config, **fallback)
            told = dataclasses.replace(result.answer, fallbacks=(answers.estimate(config),))
            result = dataclasses.replace(result, answer=told)
        if predicted:
            result = Result(answer=answers.answer(best=predicted, gpu="NVIDIA L4"))
        self.watch = result.callback(window_steps=1, say=lambda _: None)
        self._arguments = result.training_arguments(output_dir="out", report_to=[])
        monkeypatch.setattr(type(self._arguments), "device", torch.device("cuda", 0))
        self.tell("on_train_begin", model=torch.nn.Linear(1, 1))

    def tell(self, event: str, **kwargs: Any) -> None:
        getattr(self.watch, event)(self._arguments, TrainerState(), TrainerControl(), **kwargs)

    def step(self) -> None:
        self.tell("on_step_begin")
        self.watch._step_tokens = 64
        # Far below 64 tokens in 1e-9 s.
        time.sleep(1e-3)
        self.tell("on_step_end")


def test_memory_beyond_the_plan_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.step()
    assert len(card.watch.lines) == 1
    # Within five per cent, then beyond.
    for peak_gib in (9.4, 9.9):
        card.peak_gib = peak_gib
        card.step()
    card.peak_gib = 10.8
    card.tell("on_train_end")
    _, more, end = card.watch.lines
    assert more == (
        "autotune: more memory than measured: 9.90 GiB reserved at the peak, 9.00 GiB measured (+10 %); "
        "2.00 GiB of 12.00 GiB are free. Likely cause: unknown"
    )
    assert "10.80 GiB reserved (+20 %): not as planned" in end


def test_memory_beyond_the_plan_says_what_to_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(
        monkeypatch,
        {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "activation_checkpointing": 1},
    )
    card.peak_gib = 9.9
    card.step()
    assert card.watch.lines[-1].endswith(
        "Likely cause: unknown. Should memory run out, go on from a checkpoint with .fallbacks[0]: "
        "micro-batch 1 x 4, checkpoint every layer"
    )


def test_what_vllm_holds_in_this_process_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, ["NVIDIA L4"])
    config = dataclasses.replace(
        CONFIG,
        trainer="trl-grpo",
        batching="padded",
        num_generations=4,
        max_completion_length=LENGTH // 2,
        vllm_gpu_memory_utilization=0.25,
    )
    plan = answers.estimate(
        config,
        step_seconds=1e-9,
        peak_reserved_bytes=5 * GIB,
        nontorch_bytes=4 * GIB,
        vllm_bytes=3 * GIB,
    )
    card = Card(monkeypatch, predicted=plan)
    # torch counts 5 GiB of training and vLLM's 3: 1 GiB is outside, 2 GiB are others'.
    card.peak_gib, card.free_gib = 8.0, 1.0
    for _ in range(NUM_WARM_UP_STEPS + 2):
        card.step()
    told = "\n".join(card.watch.lines)
    assert "more memory than" not in told
    assert "other programs are on the card, with 2.00 GiB of it" in told


@pytest.mark.parametrize(
    ("num_retries", "peak_gib", "free_gib", "clock_reasons", "cause"),
    [
        (3, 9.0, 2.0, 0, "memory is short: the allocator emptied its cache 3 times"),
        # 12 - 9 - 1 outside torch - 0.5 free
        (0, 9.0, 0.5, 0, "other programs are on the card, with 1.50 GiB of it"),
        (0, 9.0, 2.0, 0x40, "the card is slowed down: too hot"),
        (0, 9.0, 2.0, 0, "unknown; "),
    ],
)
def test_why_a_card_is_slow(
    monkeypatch: pytest.MonkeyPatch,
    num_retries: int,
    peak_gib: float,
    free_gib: float,
    clock_reasons: int,
    cause: str,
) -> None:
    fake_nvml(monkeypatch, ["NVIDIA L4"], clock_reasons=clock_reasons)
    card = Card(monkeypatch)
    card.num_retries, card.peak_gib, card.free_gib = num_retries, peak_gib, free_gib
    for _ in range(NUM_WARM_UP_STEPS + 2):
        card.step()
    (slower,) = card.watch.lines[1:]
    assert f"Likely cause: {cause}" in slower


class Ticks:
    """A device that lags behind: it passes a mark when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = 0.0

    def mark(self) -> float:
        return self.now

    def is_past(self, mark: float) -> bool:
        return mark <= self.passed

    def seconds(self, first: float, last: float) -> float:
        assert self.is_past(last), "it waited"
        return last - first


def test_steps_are_counted_when_the_device_has_passed_them() -> None:
    clock = Ticks()
    pace = Pace(clock, window_steps=2)
    for number in range(1, NUM_WARM_UP_STEPS + 5):
        if number == NUM_WARM_UP_STEPS + 2:
            clock.now += 50.0
            pace.interrupt()
        # A fast step, then slower ones.
        clock.now += 1.0 if number <= NUM_WARM_UP_STEPS + 1 else 4.0
        pace.begin_step()
        pace.end_step(tokens=8)
        assert pace.speed is None
    clock.passed = NUM_WARM_UP_STEPS + 1.0
    pace.take()
    assert (pace.speed, pace.recent_speed) == (8.0, None)
    clock.passed = clock.now
    pace.take()
    # One of a second and two of four; the one with the interruption in it does not count.
    assert pace.speed == pytest.approx(3 * 8 / 9)
    assert pace.recent_speed == 2.0
