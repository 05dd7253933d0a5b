"""The sum as it is taught, beside what the prediction says."""

from __future__ import annotations

import dataclasses
import io

import here
import pytest
import tiny_model
from written_trace import Answer

from autotune.catalogue import models
from autotune.catalogue.gpus import find_gpu
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.report.textbook import (
    Textbook,
    draw_textbook,
    per_parameter_bytes,
    stated_count,
    textbook,
)
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS

GB = 10**9


@pytest.fixture(scope="module")
def seventy() -> Textbook:
    """Llama 3.1 70B in 16 bits, every weight trained."""
    source, card = models.resolve("llama-3.1-70b"), find_gpu("h200")
    config = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=1024,
        precision="bf16-true",
        optimizer="adamw_torch_fused",
    )
    traces = trace_all(source, "causal-lm", 1024, card, [TraceSpec.of(config)], server=here.workers)
    estimator = Estimator(traces, card, memory_budget_bytes=card.capacity_bytes)
    return textbook(estimator, estimator.estimate(config), source.name)


@pytest.mark.worker
def test_seventy_billion_parameters_are_560_gb_as_taught(seventy: Textbook) -> None:
    adamw = next(row for row in seventy.optimizers if row.optimizer == "adamw_torch_fused")
    assert seventy.stated_weights_bytes == 140 * GB
    assert seventy.stated_gradients_bytes == 140 * GB
    assert adamw.state_bytes == 280 * GB
    assert adamw.total_bytes == 560 * GB


@pytest.mark.worker
def test_exactly_it_is_a_little_more(seventy: Textbook) -> None:
    # 70,553,706,496 parameters (the Hub's safetensors.total) of 2 bytes.
    assert seventy.num_parameters == 70_553_706_496
    assert seventy.weights_bytes == seventy.gradients_bytes == 141_107_412_992
    adamw = next(row for row in seventy.optimizers if row.optimizer == "adamw_torch_fused")
    assert adamw.exact_state_bytes == pytest.approx(282_214_825_984, abs=10_000)
    assert adamw.peak_device_bytes is not None
    # It peaks in the optimizer's step: the activations are gone, their blocks are still reserved.
    assert 564 * GB < adamw.peak_device_bytes < 620 * GB
    assert adamw.difference.startswith("cached +")


@pytest.mark.worker
def test_every_optimizer_has_its_row(seventy: Textbook) -> None:
    rows = {row.optimizer: row for row in seventy.optimizers}
    assert rows.keys() == OPTIMIZERS.keys()
    taught = {name: row.state_bytes_per_parameter for name, row in rows.items()}
    assert taught["adamw_torch"] == 4  # two moments in 16 bits
    assert taught["paged_adamw_32bit"] == 8  # two in float32
    assert taught["adamw_bnb_8bit"] == 2
    assert taught["lion_32bit"] == 4
    assert taught["lion_8bit"] == 1
    assert taught["sgd"] == taught["adafactor"] == 0
    assert taught["galore_adamw"] == 0  # moments of rank 128: what they take hardly counts
    assert taught["ademamix"] == 12  # three in float32


@pytest.mark.worker
def test_the_drawing_has_the_figures_of_the_record(seventy: Textbook) -> None:
    file = io.StringIO()
    draw_textbook(seventy, file)
    text = file.getvalue()
    assert "P = 70.0 B parameters, as the model is named; 70,553,706,496 exactly" in text
    assert "weights 2P = 140.0 GB; 141.1 exactly" in text
    # 70e9 parameters: 12 and 6 bytes each, as guides quote; 16-bit weights have no float32 copy.
    quoted = "12P = 840.0 GB with AdamW, 6P = 420.0 GB with 8-bit AdamW; here no float32 copy"
    assert quoted in " ".join(text.split())
    assert "4P of adamw_torch, 2P of adamw_bnb_8bit" in " ".join(text.split())
    (line,) = (line for line in text.splitlines() if line.startswith("adamw_torch_fused"))
    assert line.split()[1:5] == ["4P", "280.0", "282.2", "560.0"]


@pytest.mark.parametrize(
    ("model", "exact", "stated"),
    [
        ("meta-llama/Llama-3.1-70B", 70_553_706_496, 70_000_000_000),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304, 1_500_000_000),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008, 135_000_000),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, 1_100_000_000),
        ("openai/gpt-oss-20b", 20_914_757_184, 20_000_000_000),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, 47_000_000_000),
        ("google/gemma-2-2b", 2_614_341_888, 2_600_000_000),  # the name is 30 % off
        ("openai-community/gpt2", 124_439_808, 120_000_000),
        ("models/3.5B-test/config.json", 6_000_000_000, 6_000_000_000),
    ],
)
def test_the_count_is_that_of_the_name_where_it_is_near(
    model: str, exact: int, stated: int
) -> None:
    assert stated_count(model, exact) == stated


@pytest.mark.worker
def test_an_adapter_is_taught_with_two_counts() -> None:
    config = next(c for c in tiny_model.configs(("qlora",)) if c.lora_rank == 16)
    estimator = Estimator(tiny_model.traces(), tiny_model.gpu(), memory_budget_bytes=100 * GB)
    priced = estimator.estimate(config)
    book = textbook(estimator, priced, "tiny")
    assert book.num_parameters == priced.parameters.total - priced.parameters.trainable
    assert book.weight_bits == 4
    assert book.gradients_bytes == 2 * priced.parameters.trainable
    # 4 bits each for the model's own, 16 for the adapter's beside them.
    assert book.weights_bytes == book.num_parameters // 2 + 2 * priced.parameters.trainable
    assert book.stated_weights_bytes < book.num_parameters
    file = io.StringIO()
    draw_textbook(book, file)
    assert "of an adapter" in file.getvalue()


@pytest.mark.worker
def test_what_does_not_go_with_the_configuration_says_so() -> None:
    config = next(c for c in tiny_model.configs(("full",)) if c.micro_batch_size == 2)
    estimator = Estimator(tiny_model.traces(), tiny_model.gpu(), memory_budget_bytes=100 * GB)
    priced = estimator.estimate(config)
    broken = dataclasses.replace(config, activation_offloading=True, activation_checkpointing=0)
    book = textbook(estimator, dataclasses.replace(priced, config=broken), "tiny")
    assert all(row.peak_device_bytes is None for row in book.optimizers)
    assert all("does not go with it" in row.difference for row in book.optimizers)


def test_state_per_parameter_follows_the_dtype() -> None:
    assert per_parameter_bytes("adamw_torch", "float32") == 8
    assert per_parameter_bytes("adamw_torch", "bfloat16") == 4
    assert 2 < per_parameter_bytes("adamw_bnb_8bit", "float32") < 2.1


ONE = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="sgd",
)


def of_one_matrix(config: TrainConfig, trained: list[int]) -> Textbook:
    """The sums of a model of a matrix of 40,000 x 25,000, and of an adapter beside it if one is trained."""
    is_full = config.method == "full"
    size = 4 if config.precision == "fp32" else 2
    a = Answer(full=0, traced=0)
    facts = {"group": 0, "embedding": False, "category": "parameter"}
    dtype = "float32" if size == 4 else "bfloat16"
    a.block("weights").alloc(
        *("w", [size * 10**9, 0, 0]),
        **facts | {"shape": [[40_000, 0, 0], [25_000, 0, 0]], "dtype": dtype},
        linear=True,
        trainable=is_full,
    )
    if not is_full:
        a.block("adapter").alloc(
            *("v", [2 * 10**6, 0, 1]),
            **facts | {"shape": [[10**6, 0, 1]], "dtype": "bfloat16"},
            linear=True,
            trainable=True,
        )
    a.block("embed")
    a.block("head_backward").gradient("g" if is_full else "h", trained)
    a.tensors[-1]["of"] = a.number["w" if is_full else "v"]
    total = [[10**9, 0, 0], *([] if is_full else [[10**6, 0, 1]])]
    a.parameters = [
        {"stack": 0, "layer": -1, "total": total, "trainable": total[0 if is_full else 1 :]}
    ]
    traces = {TraceSpec.of(config): a.trace()}
    estimator = Estimator(traces, find_gpu("h200"), memory_budget_bytes=140 * GB)
    return textbook(estimator, estimator.estimate(config), "made/up-1.1B")


def test_what_is_taught_of_a_matrix_beside_what_it_takes() -> None:
    """The name says a tenth more than there is."""
    book = of_one_matrix(ONE, [2 * 10**9, 0, 0])
    assert (book.stated_parameters, book.num_parameters) == (1_100_000_000, 10**9)
    assert (book.stated_trainable, book.num_trainable) == (1_100_000_000, 10**9)
    assert (book.weight_bits, book.gradient_bytes_per_parameter) == (16, 2)
    assert (book.stated_weights_bytes, book.weights_bytes) == (2_200_000_000, 2 * GB)
    assert (book.stated_gradients_bytes, book.gradients_bytes) == (2_200_000_000, 2 * GB)
    rows = {row.optimizer: row for row in book.optimizers}
    sgd, adamw, lomo = rows["sgd"], rows["adamw_torch"], rows["lomo"]
    assert (sgd.state_bytes, sgd.total_bytes, sgd.exact_state_bytes) == (0, 4_400_000_000, 0)
    assert adamw.state_bytes_per_parameter == 4
    assert adamw.state_bytes == 4_400_000_000
    assert adamw.total_bytes == 8_800_000_000
    assert adamw.exact_state_bytes == 4 * GB
    # The card's context is not taught; weights and gradients take a tenth less than is.
    assert sgd.difference == "outside +0.8, weights -0.2, gradients -0.2"
    # A list of square roots; two copies in float32, and no gradient of them all at a time.
    assert adamw.difference == "temporaries +2.0, outside +0.8, optimizer -0.4"
    assert lomo.difference.startswith("temporaries +8.0, gradients -2.2")
    file = io.StringIO()
    draw_textbook(book, file)
    text = " ".join(file.getvalue().split())
    assert "P = 1.10 B parameters, as the model is named; 1,000,000,000 exactly" in text
    assert "weights 2P = 2.2 GB; 2.0 exactly" in text
    assert "gradients 2P = 2.2 GB; 2.0 exactly" in text
    assert "12P = 13.2 GB with AdamW, 6P = 6.6 GB with 8-bit AdamW" in text
    assert "no float32 copy of weights lives: 4P of adamw_torch, 2P of adamw_bnb_8bit" in text
    lines = {line.split()[0]: line.split() for line in file.getvalue().splitlines() if line}
    assert lines["adamw_torch"][1:5] == ["4P", "4.4", "4.0", "8.8"]
    assert lines["sgd"][1:5] == ["0", "0.0", "0.0", "4.4"]


def test_float32_weights_are_said_to_be_their_own_copy() -> None:
    book = of_one_matrix(dataclasses.replace(ONE, precision="fp32"), [4 * 10**9, 0, 0])
    assert (book.weight_bits, book.weights_bytes, book.gradients_bytes) == (32, 4 * GB, 4 * GB)
    file = io.StringIO()
    draw_textbook(book, file)
    text = " ".join(file.getvalue().split())
    assert "weights 4P = 4.4 GB; 4.0 exactly" in text
    assert "here the weights are float32 themselves: 8P of adamw_torch" in text


def test_what_is_taught_of_an_adapter_counts_it_apart() -> None:
    """Rank 3 of a million weights each; two figures of it are said."""
    config = dataclasses.replace(ONE, method="lora", lora_rank=3, lora_targets="all-linear")
    book = of_one_matrix(config, [2 * 10**6, 0, 1])
    assert (book.num_parameters, book.num_trainable) == (10**9, 3 * 10**6)
    assert (book.stated_parameters, book.stated_trainable) == (1_100_000_000, 3 * 10**6)
    assert book.stated_weights_bytes == 2_200_000_000 + 6 * 10**6
    assert book.weights_bytes == 2 * GB + 6 * 10**6
    assert book.stated_gradients_bytes == book.gradients_bytes == 6 * 10**6
    file = io.StringIO()
    draw_textbook(book, file)
    text = " ".join(file.getvalue().split())
    assert "T = 3.00 M of an adapter, beside the weights" in text
    assert "gradients 2T = 0.0 GB; 0.0 exactly" in text
    rows = {row.optimizer: row for row in book.optimizers}
    assert rows["adamw_torch"].state_bytes == 4 * 3 * 10**6
    # What does not go with it has neither an exact figure nor a peak.
    assert rows["lomo"].exact_state_bytes is rows["lomo"].peak_device_bytes is None
    assert rows["lomo"].difference.startswith("does not go with it: ")
