"""The loss in parts computes what the installed models' own loss does; who cannot have it is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autotune.worker.build.chunked_loss import cap_of_logits, chunk_loss

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
OF_KIND: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma": {},
    "phi": {},  # its head has a bias
    "olmo2": {},
    "gpt2": {},
    "gpt_neox": {},
    "gemma3_text": {},  # it caps its logits only where its configuration says so
    "gemma2": {"final_logit_softcapping": 0.5},
    "gemma4_text": {"final_logit_softcapping": 2.0, "hidden_size_per_layer_input": 0},
    "gemma3n_text": {
        "final_logit_softcapping": 2.0,
        "intermediate_size": [64, 64],
        "layer_types": ["full_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "activation_sparsity_pattern": None,
        "laurel_rank": 4,
    },
    "granite": {"logits_scaling": 6.0},
    "hyperclovax": {"logits_scaling": 0.5},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "falcon_h1": {
        "lm_head_multiplier": 0.5,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "output_router_logits": True,
    },
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**TINY | OF_KIND.get(kind, {}))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("num_items", [None, 11])
@pytest.mark.parametrize("kind", OF_KIND)
def test_loss_and_gradients_are_those_of_all_logits(kind: str, num_items: int | None) -> None:
    whole = model_of(kind)
    parted = copy.deepcopy(whole)
    undo = chunk_loss(parted)
    labels = torch.randint(3, 97, (3, 21))
    labels[0, :7], labels[2, 15:] = -100, -100
    inputs = {"input_ids": torch.randint(3, 97, (3, 21)), "labels": labels}
    if num_items is not None:
        inputs["num_items_in_batch"] = torch.tensor(num_items)
    losses = []
    for model in (whole, parted):
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    other = dict(parted.named_parameters())
    for name, parameter in whole.named_parameters():
        assert (parameter.grad is None) == (other[name].grad is None), name
        if parameter.grad is not None:
            near = max(1e-6, 4e-6 * parameter.grad.abs().max().item())  # of rounding in float32
            torch.testing.assert_close(other[name].grad, parameter.grad, rtol=1e-4, atol=near)
    undo()
    ids = inputs["input_ids"]
    torch.testing.assert_close(parted(ids).logits, whole(ids).logits)
    # What is saved has the same names.
    assert whole.state_dict().keys() == parted.state_dict().keys()


def test_gradients_add_up_in_autocast_and_nothing_is_kept_without_them() -> None:
    """A tied embedding gets two gradients in each of two micro-batches; autocast keeps casts of weights."""
    whole = model_of("qwen2")
    parted = copy.deepcopy(whole)
    chunk_loss(parted)
    ids = torch.randint(3, 97, (2, 40))
    for model in (whole, parted):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
    other = dict(parted.named_parameters())
    for name, parameter in whole.named_parameters():
        most = parameter.grad.abs().max().item()
        torch.testing.assert_close(other[name].grad, parameter.grad, rtol=0, atol=0.02 * most)
    with torch.no_grad():
        assert not parted(input_ids=ids, labels=ids).loss.requires_grad


def test_a_heads_gradient_does_not_overflow_in_float16() -> None:
    """It is summed over tokens before any loss scaling: 2,000 of 300 here, beyond float16's 65,504."""
    model = model_of("llama")
    head = model.get_output_embeddings()
    chunk_loss(model)
    hidden = torch.full((2, 1000, TINY["hidden_size"]), 300.0, requires_grad=True)
    labels = torch.full((2, 1000), 5)
    with torch.autocast("cpu", torch.float16):
        logits = torch.nn.functional.linear(hidden.detach(), head.weight)
        loss = model.loss_function(logits=hidden, labels=labels)
    loss.backward()
    chances = logits.float().softmax(-1).flatten(0, 1)
    chances[:, 5] -= 1
    kept = labels.flatten()[: len(chances)] >= 0
    kept[[999, 1999]] = False  # Nothing follows a sample's last token.
    expected = chances[kept].T @ hidden.detach().flatten(0, 1)[kept] / kept.sum()
    assert expected.abs().max() * kept.sum() > 65_504
    torch.testing.assert_close(head.weight.grad, expected, rtol=0.01, atol=0.1)


@pytest.mark.parametrize(
    ("samples", "length", "parts"),
    [
        (2, 1024, [128] * 8),
        (2, 21, [3] * 7),
        (2, 9000, [1024] * 8 + [808]),
        (1, 1024, [256] * 4),
        (1, 300, [256, 44]),
        (1, 4096, [512] * 8),
        (1, 9000, [1024] * 8 + [808]),
    ],
)
def test_parts_have_few_logits_but_not_few_tokens(
    samples: int, length: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part reads the head's weights: a sample alone has larger ones."""
    model = model_of("llama")
    chunk_loss(model)
    seen = []
    likelihoods = torch.nn.functional.softmax

    def softmax(logits: torch.Tensor, dim: int, **dtype: torch.dtype) -> torch.Tensor:
        seen.append(logits.shape)
        return likelihoods(logits, dim, **dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    labels = torch.zeros(samples, length, dtype=torch.long)
    hidden = torch.zeros(samples, length, TINY["hidden_size"], requires_grad=True)
    model.loss_function(logits=hidden, labels=labels).backward()
    assert seen == [(samples * part, TINY["vocab_size"]) for part in parts]


@pytest.mark.parametrize("kind", ["mamba", "opt"])
def test_logits_that_are_changed_have_no_parts(kind: str) -> None:
    model = model_of(kind)
    before = model(torch.tensor([[3, 4, 5]])).logits
    with pytest.raises(ValueError, match="does more with its logits"):
        chunk_loss(model)
    assert torch.equal(model(torch.tensor([[3, 4, 5]])).logits, before)


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_cap_is_the_configurations(cap: float | None) -> None:
    config = CONFIG_MAPPING["gemma3_text"](**TINY, final_logit_softcapping=cap)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert cap_of_logits(model, model.get_output_embeddings()) == cap


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_over_the_head_has_no_parts() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="no plain product"):
        chunk_loss(peft.get_peft_model(model_of("llama"), lora))


def test_what_is_least_likely_has_a_most_of_loss_and_all_of_its_gradient() -> None:
    """Its probability is below float32's least."""
    model = model_of("llama")
    head = model.get_output_embeddings()
    head.weight.data = torch.zeros_like(head.weight)
    head.weight.data[7] = 10.0
    chunk_loss(model)
    hidden = torch.ones(1, 2, TINY["hidden_size"], requires_grad=True)
    loss = model.loss_function(logits=hidden, labels=torch.tensor([[5, 5]]))
    loss.backward()
    assert loss.item() == pytest.approx(87.3365, abs=1e-3)
    torch.testing.assert_close(
        hidden.grad[0], torch.stack([head.weight[7], head.weight[5]]).detach()
    )
