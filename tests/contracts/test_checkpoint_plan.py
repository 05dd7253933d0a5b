"""A plan of checkpointing changes neither loss nor gradients, and keeps what it says it does."""

from __future__ import annotations

import copy
import itertools
import json
import weakref
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS
from autotune.space.config import TrainConfig
from autotune.worker.build import checkpoint_plan
from autotune.worker.build import model as models
from autotune.worker.build.checkpoint_plan import HostMemory, checkpoint_layers
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step

NUM_LAYERS = 3
HIDDEN = 256
TINY: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 320,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "use_cache": False,
}
# architecture: the auto class, and dropout that must be the same when a layer is computed again; in attention
# it would have no kernel of its own on a CPU
OF_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", {}),
    "qwen2": ("AutoModelForCausalLM", {}),
    "gpt2": ("AutoModelForCausalLM", {"resid_pdrop": 0.1, "attn_pdrop": 0.0}),
    "bert": (
        "AutoModelForMaskedLM",
        {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0},
    ),
}
# Products with a weight in one layer that are [.., 256] x [256, outer], outer at least as much; and all.
PRODUCTS = {"llama": (4, 7), "qwen2": (4, 7), "gpt2": (3, 4), "bert": (5, 6)}


def model_of(kind: str, attention: str = "sdpa", num_layers: int = NUM_LAYERS) -> Any:
    torch.manual_seed(0)
    auto, more = OF_KIND[kind]
    config = CONFIG_MAPPING[kind](**TINY | more | {"num_hidden_layers": num_layers})
    return getattr(transformers, auto).from_config(config, attn_implementation=attention).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def loss_of(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    loss: torch.Tensor = model(**batch()).loss
    return loss


def planned(model: Any, name: str, count: int) -> Any:
    plan = CHECKPOINT_PLANS[name]
    return checkpoint_layers(model, count, plan.first_keep, plan.others_keep)


class Counted(TorchDispatchMode):
    """Counts operations, products with a weight by whether a plan keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name in ("aten.mm.default", "aten.addmm.default"):
            inner, outer = args[-1].shape
            is_long = inner == HIDDEN and outer >= HIDDEN
            self.counts["kept" if is_long else "cheap"] += 1
        if "scaled_dot_product" in name and "backward" not in name:
            self.counts["attention"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CHECKPOINT_PLANS)
@pytest.mark.parametrize("kind", OF_KIND)
def test_loss_and_gradients_are_those_without(kind: str, name: str) -> None:
    plain = model_of(kind)
    model = copy.deepcopy(plain)
    undo = planned(model, name, 2)
    losses = []
    for each in (plain, model):
        loss = loss_of(each)
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    others = dict(model.named_parameters())
    for of, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(others[of].grad, parameter.grad, rtol=1e-6, atol=1e-7)
    assert plain.state_dict().keys() == model.state_dict().keys()
    undo()
    assert runs_again(model, kind) == {}


def runs_again(model: Any, kind: str) -> dict[str, int]:
    """What the backward pass runs of the forward pass once more, beside a backward pass without a plan."""
    found = []
    for each in (model_of(kind), model):
        loss = loss_of(each)
        with Counted() as counted:
            loss.backward()
        found.append(counted.counts)
    return dict(found[1] - found[0])


@pytest.mark.parametrize("kind", OF_KIND)
def test_what_is_kept_is_not_computed_again(kind: str) -> None:
    num_kept, num_all = PRODUCTS[kind]
    again = {}
    for name in CHECKPOINT_PLANS:
        model = model_of(kind)
        planned(model, name, 2)
        again[name] = runs_again(model, kind)
    # What nothing in the layer needs is not computed again: the last product where no dropout follows.
    num_cheap = num_all - num_kept - (kind in ("llama", "qwen2"))
    cheap = {"cheap": 2 * num_cheap} if num_cheap else {}
    assert again["recompute"] == {"kept": 2 * num_kept, "attention": 2, **cheap}
    assert again["products"] == cheap
    of_all = {"cheap": NUM_LAYERS * num_cheap} if num_cheap else {}
    assert again["recompute-products"] == {"kept": 2 * num_kept, "attention": 2, **of_all}
    assert again["offload"] == again["products"]
    assert again["offload-products"] == of_all
    assert again["recompute-offload"] == again["recompute-products"]


class Late(HostMemory):
    """Host memory whose copies are made as late as a stream may make them: when one is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Callable[[], None]] = []
        self.num_made = 0

    def copy(self, tensor: Any, piece: Any, is_out: bool) -> None:
        alive, copy_now = weakref.ref(tensor), super().copy

        def run() -> None:
            there = alive()
            if there is None:  # It was let go before it was copied.
                piece.fill_(255)
            else:
                copy_now(there, piece, is_out)

        self.begun.append(run)
        if not is_out:
            tensor.fill_(float("nan"))

    def mark(self) -> int:
        return len(self.begun)

    def wait(self, copied: Any) -> None:
        while self.begun[self.num_made : copied]:
            self.begun[self.num_made]()
            self.num_made += 1


@pytest.mark.parametrize(
    ("kind", "name", "num_frozen"),
    [("qwen2", "recompute-offload", 0), ("gpt2", "offload", 0), ("qwen2", "offload", 2)],
)
def test_copies_are_waited_for_and_host_memory_is_used_again(
    kind: str, name: str, num_frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Late] = []
    monkeypatch.setattr(checkpoint_plan, "HostMemory", lambda: made.append(Late()) or made[-1])
    plain = model_of(kind, num_layers=5)
    if num_frozen:  # No gradient goes through the first layers.
        for part in (plain.get_input_embeddings(), *plain.model.layers[:num_frozen]):
            part.requires_grad_(False)
    model = copy.deepcopy(plain)
    planned(model, name, 4 if name == "offload" else 1)
    held = []
    for _ in range(2):
        loss_of(model)  # It is looked at, and no backward pass comes.
        for each in plain, model:
            loss_of(each).backward()
        (host,) = made
        held.append(sum(len(piece) for pieces in host.unused.values() for piece in pieces))
    others = dict(model.named_parameters())
    for of, parameter in plain.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad)
        torch.testing.assert_close(others[of].grad, parameter.grad, rtol=1e-6, atol=1e-7)
    assert held[0] == held[1] > 0


@pytest.mark.parametrize("count", [0, NUM_LAYERS + 1])
def test_a_number_of_layers_that_the_model_lacks_is_refused(count: int) -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match=f"3 layers that can be .* the plan is for {count} of"):
        planned(model, "recompute", count)
    assert runs_again(model, "llama") == {}


@pytest.mark.parametrize("num_decoder_layers", [3, 2])
def test_the_first_layers_of_an_encoder_and_of_a_decoder_are_lean(num_decoder_layers: int) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_decoder_layers=num_decoder_layers,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    plain = transformers.AutoModelForSeq2SeqLM.from_config(config).train()
    model = copy.deepcopy(plain)
    if num_decoder_layers == 2:
        with pytest.raises(ValueError, match="5 layers that can be checkpointed, of 3 each in"):
            planned(model, "recompute", 2)
        return
    planned(model, "recompute", 2)
    for stack in model.encoder.block, model.decoder.block:
        assert ["forward" in vars(layer) for layer in stack] == [True, True, False]
    assert torch.equal(loss_of(plain), loss_of(model))
    for each in plain, model:
        loss_of(each).backward()
    others = dict(model.named_parameters())
    for of, parameter in plain.named_parameters():
        torch.testing.assert_close(others[of].grad, parameter.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_trains_in_layers_whose_input_needs_no_gradient() -> None:
    peft = pytest.importorskip("peft")
    gradients = []
    for name in (None, "recompute-products"):
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model_of("qwen2"), lora)
        if name is not None:
            planned(model, name, 1)
        loss_of(model).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    plain, of_plan = gradients
    assert plain
    for name, gradient in plain.items():
        assert bool(gradient.any())
        torch.testing.assert_close(of_plan[name], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CHECKPOINT_PLANS)
def test_in_full_fine_tuning_no_other_layers_would_be_better_lean_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks of steps on `meta` with each choice of two of five layers, every layer traced."""
    plan = CHECKPOINT_PLANS[name]
    spec = TraceSpec.of(
        TrainConfig(
            method="full",
            micro_batch_size=2,
            gradient_accumulation_steps=1,
            sequence_length=512,
            precision="bf16-true",
            optimizer="adamw_torch_fused",
            activation_checkpointing=1,
            checkpoint_plan=name,
            checkpoint_layers=2,
        )
    )
    config = {**TINY, "model_type": "llama", "num_hidden_layers": 5, "intermediate_size": 704}

    def peak_bytes(lean: tuple[int, ...]) -> int:
        def choose(model: Any, *_: Any) -> Any:
            layers = list(model.model.layers)
            others = [each for number, each in enumerate(layers) if number not in lean]
            order = [*(layers[number] for number in lean), *others]
            stack = SimpleNamespace(modules=lambda: order, config=model.config)
            return checkpoint_layers(stack, len(lean), plan.first_keep, plan.others_keep)

        monkeypatch.setattr(models, "checkpoint_layers", choose)
        answer = trace_step(
            models.load_config(config),
            "causal-lm",
            spec,
            sequence_length=512,
            device=Device(compute_capability=(8, 9), cublas_workspace_bytes=8_519_680),
            whole=True,
        )
        trace = Trace(json.loads(json.dumps(answer)))
        return int(trace.running_bytes("again", 2, 0).max())

    peaks = {lean: peak_bytes(lean) for lean in itertools.combinations(range(5), 2)}
    assert peaks[0, 1] == min(peaks.values())
    assert peaks[0, 1] < max(peaks.values())
