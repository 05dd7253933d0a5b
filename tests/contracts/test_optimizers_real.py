"""The real optimizers under the tracker, against what optimizer_steps.py predicts, event by event.

Class and arguments come from transformers.Trainer, parameters are grouped as it groups them. Where
a CUDA run differs from what can be run here:
- torch's foreach AdamW and SGD, and Adafactor, run on `meta`: their allocations are made in Python
  or in device-independent code. `foreach=True` is passed, which CUDA parameters select themselves.
- Fused AdamW runs on the CPU, which keeps `step` beside the parameter as CUDA does.
- clip_grad_norm_ runs on the CPU, where _foreach_norm makes no partial sums: they are left out of
  the comparison.
- bitsandbytes runs on the CPU. Its update kernels allocate there, so only what stays is compared.
  The code books are moved by `.to(device)`, no allocation on a CPU: compared with the books' size.
  Paged state falls back to ordinary memory: the two sums are compared together.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_step import Events, canonical

from autotune.memory.allocator import Tape
from autotune.memory.optimizers import TensorSpec, write_clip, write_unscale
from autotune.space.optimizers import OPTIMIZERS, state_bytes
from autotune.worker.trace.tracker import Recording, Tracker

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BF16, FP32 = "bfloat16", "float32"


BITSANDBYTES = [name for name, row in OPTIMIZERS.items() if row.needs == "bitsandbytes"]


def spec(
    *shape: int, dtype: str = FP32, group: int = 0, embedding: bool = False, linear: bool = False
) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, group=group, embedding=embedding, linear=linear)


CASES = {
    "fp32": [spec(64, 64), spec(63, 65), spec(4097), spec(7)],
    "bf16": [spec(64, 64, dtype=BF16), spec(4095, dtype=BF16), spec(3, 4, 6, dtype=BF16)],
    "two groups": [spec(7, group=1), spec(50, 90), spec(1, group=1), spec(300, 400)],
    "mixed dtypes": [spec(100, 30, dtype=BF16), spec(7), spec(5000, dtype=BF16), spec(9, 9)],
    "fp32 first": [spec(100, 30), spec(7, dtype=BF16), spec(8, 600, dtype=BF16), spec(1, 1)],
    "paged sizes": [spec(100_000), spec(99_999, dtype=BF16), spec(400, 300, dtype=BF16)],
}


def seen(recording: Recording, first: int) -> Events:
    """What a recording saw from tensor number `first` on."""
    sizes = [tensor.size_bytes for tensor in recording.tensors]
    return canonical([event for event in recording.events if max(event, ~event) >= first], sizes)


def written(tape: Tape) -> Events:
    return canonical(tape.events, tape.sizes)


def make_parameters(specs: Sequence[TensorSpec], device: str) -> list[torch.nn.Parameter]:
    parameters = []
    for item in specs:
        dtype = getattr(torch, item.dtype)
        parameter = torch.nn.Parameter(torch.ones(item.shape, dtype=dtype, device=device))
        parameter.grad = torch.ones_like(parameter)
        parameters.append(parameter)
    return parameters


@pytest.fixture(scope="module")
def trainer_choice(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """(optimizer class, arguments) that the installed Trainer makes of an `optim` value."""
    from transformers import Trainer, TrainingArguments

    folder: Path = tmp_path_factory.mktemp("trainer")

    def choose(name: str) -> tuple[Any, Any]:
        arguments = TrainingArguments(output_dir=str(folder), optim=name, use_cpu=True)
        return Trainer.get_optimizer_cls_and_kwargs(arguments)

    return choose


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Storages must die when their last reference does, not when the collector comes by."""
    gc.disable()
    yield
    gc.enable()


def make_optimizer(
    choice: tuple[Any, Any], specs: Sequence[TensorSpec], parameters: list[Any], **extra: object
) -> Any:
    """As Trainer.create_optimizer: two groups, weight_decay 0 in both."""
    groups = [
        {
            "params": [p for s, p in zip(specs, parameters, strict=True) if s.group == number],
            "weight_decay": 0.0,
        }
        for number in (0, 1)
    ]
    optimizer_class, arguments = choice
    return optimizer_class(groups, **arguments, **extra)


def recorded_steps(optimizer: Any, parameters: list[Any], device: str, num_steps: int) -> Recording:
    tracker = Tracker(device)
    with tracker:
        for parameter in parameters:
            tracker.index_of(parameter)
            tracker.index_of(parameter.grad)
        for step in range(num_steps):
            tracker.recording.mark(step)
            optimizer.step()
    return tracker.recording


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("name", "device", "extra"),
    [
        ("adamw_torch", "meta", {"foreach": True}),
        ("adamw_torch_fused", "cpu", {}),
        ("sgd", "meta", {"foreach": True}),
        ("rmsprop", "meta", {"foreach": True}),
        ("adagrad", "meta", {"foreach": True}),
        ("adafactor", "meta", {}),
    ],
)
def test_two_steps_allocate_and_free_as_predicted(
    name: str, device: str, extra: dict[str, object], case: str, trainer_choice: Any
) -> None:
    specs = CASES[case]
    parameters = make_parameters(specs, device)
    choice = trainer_choice(name)
    tracker = Tracker(device)
    with tracker:
        for tensor in [*parameters, *(parameter.grad for parameter in parameters)]:
            tracker.index_of(tensor)
        # Some make their state with themselves.
        optimizer = make_optimizer(choice, specs, parameters, **extra)
        for _ in range(2):
            optimizer.step()
    recording = tracker.recording

    tape = Tape()
    states = OPTIMIZERS[name].algorithm.write_step(tape, specs, None)
    OPTIMIZERS[name].algorithm.write_step(tape, specs, states)
    assert seen(recording, 2 * len(specs)) == written(tape)


@pytest.mark.parametrize("case", ["fp32", "bf16"])
def test_adafactor_costs_what_was_launched(case: str, trainer_choice: Any) -> None:
    specs = CASES[case]
    parameters = make_parameters(specs, "meta")
    optimizer = make_optimizer(trainer_choice("adafactor"), specs, parameters)
    recording = recorded_steps(optimizer, parameters, "meta", num_steps=2)
    kernels = recording.kernels[recording.marks[1][1] :]
    predicted = OPTIMIZERS["adafactor"].algorithm.cost(specs)
    assert predicted.num_kernels == len(kernels)


def test_adafactor_moves_the_bytes_that_were_seen(trainer_choice: Any) -> None:
    specs = [spec(1024, 2048, dtype=BF16), spec(512, 4096), spec(1_000_000)]
    parameters = make_parameters(specs, "meta")
    optimizer = make_optimizer(trainer_choice("adafactor"), specs, parameters)
    recording = recorded_steps(optimizer, parameters, "meta", num_steps=2)
    kernels = recording.kernels[recording.marks[1][1] :]
    moved_bytes = sum(sum(kernel.tensor_bytes) for kernel in kernels)
    predicted = OPTIMIZERS["adafactor"].algorithm.cost(specs)
    assert predicted.bytes_moved == pytest.approx(moved_bytes, rel=0.01)


@pytest.fixture
def bitsandbytes_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """bitsandbytes' overrides of parameters, none before and none after."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    bitsandbytes = pytest.importorskip("bitsandbytes")
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    # A Trainer that ran here before left its embeddings, and what is new may have an old one's `id`.
    manager.initialize()
    # What AdEMAMix asks for itself, a CPU does not give; elsewhere bitsandbytes helps itself.
    functional = bitsandbytes.functional
    monkeypatch.setattr(
        functional, "get_paged", lambda *shape, **options: torch.zeros(shape, **options)
    )
    monkeypatch.setattr(functional, "fill", lambda *_: None)
    yield manager
    manager.initialize()


def run_bitsandbytes(optimizer: Any, parameters: list[Any]) -> Recording:
    if optimizer.is_paged:
        with pytest.warns(UserWarning, match="not supported on CPU"):
            return recorded_steps(optimizer, parameters, "cpu", num_steps=2)
    return recorded_steps(optimizer, parameters, "cpu", num_steps=2)


def survivors(recording: Recording, first: int) -> list[int]:
    """Bytes of what was allocated and not freed, in order."""
    freed = {~event for event in recording.events if event < 0}
    return [
        tensor.size_bytes
        for index, tensor in enumerate(recording.tensors)
        if index >= first and index not in freed
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes_keeps_the_predicted_state(
    name: str, case: str, trainer_choice: Any, bitsandbytes_manager: Any
) -> None:
    specs = CASES[case]
    parameters = make_parameters(specs, "cpu")
    optimizer = make_optimizer(trainer_choice(name), specs, parameters)
    recording = run_bitsandbytes(optimizer, parameters)

    algorithm = OPTIMIZERS[name].algorithm
    in_order = sorted(specs, key=lambda item: item.group)
    state = [tensor.size_bytes for item in in_order for tensor in algorithm.state(item)]
    assert survivors(recording, 2 * len(specs)) == state

    books = {id(t): t for s in optimizer.state.values() for k, t in s.items() if "qmap" in k}
    real_bytes = sum(state) + sum(book.nbytes for book in books.values())
    assert sum(state_bytes(name, specs)) == real_bytes


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "lion_8bit", "paged_adamw_32bit"])
def test_an_embedding_keeps_its_state_in_32_bits(
    name: str, trainer_choice: Any, bitsandbytes_manager: Any
) -> None:
    """Trainer.create_optimizer registers this override for every nn.Embedding of an 8-bit run."""
    embedding = torch.nn.Embedding(100, 64)
    specs = [spec(100, 64, embedding=True), spec(100, 64)]
    other = make_parameters(specs[1:], "cpu")
    embedding.weight.grad = torch.ones_like(embedding.weight)
    parameters = [embedding.weight, *other]
    optimizer = make_optimizer(trainer_choice(name), specs, parameters)
    if trainer_choice(name)[1]["optim_bits"] == 8:
        bitsandbytes_manager.register_module_override(embedding, "weight", {"optim_bits": 32})
    recording = run_bitsandbytes(optimizer, parameters)

    algorithm = OPTIMIZERS[name].algorithm
    predicted = [tensor.size_bytes for item in specs for tensor in algorithm.state(item)]
    assert survivors(recording, 4) == predicted


@pytest.mark.parametrize("case", CASES)
def test_clipping_allocates_and_frees_as_predicted(case: str) -> None:
    specs = CASES[case]
    parameters = make_parameters(specs, "cpu")
    tracker = Tracker("cpu")
    with tracker:
        for parameter in parameters:
            tracker.index_of(parameter.grad)
        total_norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=2)
    tape = Tape()
    kept = write_clip(tape, specs)
    assert tape.sizes[kept] == total_norm.nbytes
    assert seen(tracker.recording, len(specs)) == without_partial_sums(tape, specs)


def without_partial_sums(tape: Tape, specs: Sequence[TensorSpec]) -> Events:
    """The events but for CUDA's partial sums: the first tensor of each dtype, before its norms."""
    num_of_dtype = Counter(item.dtype for item in specs)
    last_dtype_first = list(reversed(num_of_dtype.values()))
    sums = {position + sum(last_dtype_first[:position]) for position in range(len(num_of_dtype))}
    left = [event for event in tape.events if max(event, ~event) not in sums]
    return canonical(left, tape.sizes)


@pytest.mark.parametrize("case", ["fp32", "mixed dtypes"])
def test_unscaling_allocates_and_frees_as_predicted(case: str) -> None:
    parameters = make_parameters(CASES[case], "cpu")
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    tracker = Tracker("cpu")
    with tracker:
        for parameter in parameters:
            tracker.index_of(parameter.grad)
        tracker.index_of(scaler._scale)
        scaler.unscale_(optimizer)
    tape = Tape()
    write_unscale(tape)
    assert seen(tracker.recording, len(parameters) + 1) == written(tape)


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("adamw_torch", False),
        ("adamw_torch_8bit", True),
        ("adamw_torch_4bit", True),
        ("stable_adamw", True),
        ("sgd", False),
    ],
)
@torch.compiler.set_stance("force_eager")
def test_which_optimizer_keeps_updates_that_bfloat16_rounds_away(name: str, moves: bool) -> None:
    """A hundred steps of 1/1000 of the weight each, which float32 adds up to a tenth of it."""
    from optimi import StableAdamW
    from torchao.optim import AdamW4bit, AdamW8bit

    classes: dict[str, Any] = {
        "adamw_torch": torch.optim.AdamW,
        "adamw_torch_8bit": AdamW8bit,
        "adamw_torch_4bit": AdamW4bit,
        "stable_adamw": StableAdamW,
        "sgd": torch.optim.SGD,
    }
    given = {"stable_adamw": {"triton": False}}
    said = [v for k, v in OPTIMIZERS[name].arguments if k == "optim_args"]
    arguments = given.get(
        name, {key: bool(value) for key, value in (one.split("=") for one in said)}
    )
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = classes[name]([weight], lr=1e-3, weight_decay=0.0, **arguments)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert OPTIMIZERS[name].class_name == classes[name].__name__
    assert (weight.float().mean().item() < 0.91) == moves == OPTIMIZERS[name].keeps_rounding
    assert moves or bool((weight == 1).all())


def test_bfloat16_rounds_away_what_is_less_than_a_256th_of_a_weight() -> None:
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    lost, kept = (torch.tensor(1 / n, dtype=torch.bfloat16) for n in (257, 255))
    assert one + lost == one
    assert one + kept > one
