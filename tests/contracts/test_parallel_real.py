"""What DDP and FSDP2 really give to each process, against what is predicted of each GPU.

Two and three processes share a tiny Llama over gloo on the CPU: torch's DistributedDataParallel, and
fully_shard as accelerate wraps a model. Dimensions are odd, so that shards are padded. Bytes are those
of real storages: weights, gradients, optimizer state, buckets. DeepSpeed's ZeRO is in
tests/contracts/test_zero.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import here
import peft
import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import ModelSource
from autotune.errors import ConfigError
from autotune.export.quantization_config import quantization_fields
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.library_rules import Weight, ddp_buckets, ddp_rebuilt_buckets
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.sharding.shards import Shares
from autotune.predict.tracing import of_one_gpu, trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.speed.links import COLLECTIVES
from autotune.worker.build import model as models
from autotune.worker.trace import cuda
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.cuda import Device

pytestmark = pytest.mark.slow

GPU = find_gpu("rtx-4070")
CHILD = Path(__file__).parents[1] / "support" / "parallel_child.py"
MODEL = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 130,
    "num_hidden_layers": 3,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "max_position_embeddings": 32,
}
SOURCE = ModelSource(name="tiny", config=MODEL, origin="file", path=Path("config.json"))
DDP = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=1,
    sequence_length=8,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
    parallelism="ddp",
    num_gpus=2,
)
FSDP2 = dataclasses.replace(DDP, parallelism="fsdp2")
CONFIGS = {
    "ddp": DDP,
    "ddp-lora": dataclasses.replace(
        DDP, method="lora", precision="bf16-autocast", lora_rank=3, lora_targets="all-linear"
    ),
    "ddp-parts": dataclasses.replace(DDP, chunked_loss=True),
    "fsdp2": FSDP2,
    "fsdp2-of-3": dataclasses.replace(FSDP2, num_gpus=3),
    "fsdp2-fp32": dataclasses.replace(FSDP2, precision="fp32", optimizer="adamw_torch"),
    "fsdp2-no-reshard": dataclasses.replace(FSDP2, parallelism="fsdp2-no-reshard"),
    "fsdp2-mixed": dataclasses.replace(FSDP2, precision="bf16-mixed"),
    "fsdp2-lora": dataclasses.replace(
        FSDP2, method="lora", precision="bf16-autocast", lora_rank=3, lora_targets="all-linear"
    ),
}
CONFIGS["fsdp2-qlora"] = dataclasses.replace(
    CONFIGS["fsdp2-lora"],
    method="qlora",
    quantization="nf4",
    quantization_storage="bfloat16",
)
CONFIGS["fsdp2-no-reshard-qlora"] = dataclasses.replace(
    CONFIGS["fsdp2-qlora"], parallelism="fsdp2-no-reshard"
)
TP = dataclasses.replace(DDP, parallelism="tp", optimizer="adamw_torch", attention="eager")
HSDP = dataclasses.replace(FSDP2, parallelism="hsdp", num_gpus=4)
CONFIGS |= {
    "tp": TP,
    "tp-of-3": dataclasses.replace(TP, num_gpus=3),
    "tp-of-4": dataclasses.replace(TP, num_gpus=4),
    "tp-lora": dataclasses.replace(
        TP,
        method="lora",
        precision="bf16-autocast",
        lora_rank=3,
        lora_targets="q_proj,k_proj,v_proj,gate_proj,up_proj",
    ),
    "hsdp": HSDP,
    "hsdp-mixed": dataclasses.replace(HSDP, precision="bf16-mixed"),
    "hsdp-lora": dataclasses.replace(CONFIGS["fsdp2-lora"], parallelism="hsdp", num_gpus=4),
}
CONFIGS |= {
    f"tp-lora-of-{count}": dataclasses.replace(CONFIGS["tp-lora"], num_gpus=count)
    for count in (3, 4)
}
CONFIGS["tp-tied"] = TP
TIED = dataclasses.replace(SOURCE, config={**MODEL, "tie_word_embeddings": True})
CP = dataclasses.replace(FSDP2, parallelism="cp", precision="fp32", sequence_length=24)
RINGS = {"cp": CP, "cp-of-3": dataclasses.replace(CP, num_gpus=3)}
ENCODER = {**MODEL, "num_attention_heads": 4}
T5 = {"model_type": "t5", "vocab_size": 67, "d_model": 48, "d_kv": 12, "d_ff": 130, "num_layers": 2}
T5 |= {"num_heads": 4, "decoder_start_token_id": 0}
_MASKED = {**ENCODER, "pad_token_id": 0}
BIAS_TWICE = "its weight {0}predictions.bias is {0}predictions.decoder.bias, too".format
FSDP2_RUNS = {
    "BertForMaskedLM": ({**_MASKED, "model_type": "bert"}, BIAS_TWICE("cls.")),
    "BertForTokenClassification": ({**_MASKED, "model_type": "bert"}, ""),
    "AlbertForMaskedLM": ({**_MASKED, "model_type": "albert"}, BIAS_TWICE("")),
    "AlbertForSequenceClassification": ({**_MASKED, "model_type": "albert"}, ""),
    "ElectraForMaskedLM": ({**_MASKED, "model_type": "electra"}, ""),
    "DistilBertForMaskedLM": ({"model_type": "distilbert", "vocab_size": 67, "dim": 48}, ""),
    "ModernBertForMaskedLM": ({**_MASKED, "model_type": "modernbert"}, ""),
    "T5ForConditionalGeneration": (
        T5,
        "its weight shared.weight is encoder.embed_tokens.weight and decoder.embed_tokens.weight and "
        "lm_head.weight, too",
    ),
    "GPT2LMHeadModel": ({"model_type": "gpt2", "vocab_size": 67, "n_embd": 48, "n_head": 4}, ""),
    "OPTForCausalLM": (
        {**ENCODER, "model_type": "opt", "ffn_dim": 130, "word_embed_proj_dim": 24},
        "",
    ),
    "LlamaForCausalLM": (TIED.config, ""),
    "ApertusForCausalLM": (
        {**MODEL, "model_type": "apertus"},
        "its buffer model.layers.0.mlp.act_fn.beta is in checkpoints",
    ),
}
"""Classes of models, with the beginning of why FSDP2 does not run them, if so."""
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OUTPUTS = {
    "masked-lm": ("BertForMaskedLM", {**_MASKED, **_STILL, "model_type": "bert"}),
    "causal-lm": ("LlamaForCausalLM", MODEL),
    "token-classification": (
        "BertForTokenClassification",
        {**_MASKED, **_STILL, "model_type": "bert", "num_labels": 64},
    ),
}
"""Models by task, whose outputs DDP clones."""
SHAPES = [
    ((1000, 100), "float32"),
    ((3000, 1000), "float32"),
    ((7,), "float32"),
    ((2000, 2000), "float32"),
    ((500, 1000), "bfloat16"),
    ((3000, 3000), "float32"),
    ((10, 10), "float32"),
]


@pytest.fixture(autouse=True)
def _alone_afterwards() -> Iterator[None]:
    """End the group of processes that a trace in this one has begun: what follows is traced as alone."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def source_of(name: str) -> ModelSource:
    return TIED if name.endswith("tied") else SOURCE


def case(config: TrainConfig) -> dict[str, Any]:
    precision = PRECISIONS[config.precision]
    return {
        "num_gpus": config.num_gpus,
        "config": MODEL,
        "dtype": precision.parameter_dtype,
        "mixed_precision": "bf16" if precision.autocast else "no",
        "lora": config.lora_rank or 0,
        "targets": config.lora_targets
        if config.lora_targets in (None, "all-linear")
        else config.lora_targets.split(","),
        "num_replicas": PARALLELISMS[config.parallelism].num_replicas,
        "optimizer": config.optimizer,
        "parallelism": config.parallelism,
        "keeps_gathered": PARALLELISMS[config.parallelism].keeps_gathered,
        "in_parts": config.chunked_loss,
        "quantization": quantization_fields(config) if config.quantization != "none" else {},
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each process of each case holds, by rank."""
    cases = {
        name: {**case(config), "config": source_of(name).config} for name, config in CONFIGS.items()
    }
    cases |= {name: {**case(ring), "length": ring.sequence_length} for name, ring in RINGS.items()}
    cases["fsdp2-8bit"] = {**case(FSDP2), "optimizer": "adamw_bnb_8bit"}
    cases["fsdp2-8bit"]["config"] = {**MODEL, "hidden_size": 96}
    by_rows = dataclasses.replace(CONFIGS["tp-lora"], lora_targets="o_proj")
    cases["tp-lora-rows"] = case(by_rows)
    cases["tp-fused"] = {**case(TP), "optimizer": "adamw_torch_fused"}
    for find_unused in (False, True):
        shapes = {"num_gpus": 2, "shapes": SHAPES, "find_unused": find_unused}
        cases[f"buckets-{find_unused}"] = shapes
    for name, (model, _) in FSDP2_RUNS.items():
        cases[name] = {"num_gpus": 2, "class_name": name, "config": model}
    for task, (name, model) in OUTPUTS.items():
        for find_unused in (False, True):
            shared = {"num_gpus": 2, "outputs_of": name, "find_unused": find_unused}
            cases[f"{task}-{find_unused}"] = {**shared, "config": model}
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    files = [str(folder / name) for name in ("cases.json", "report.json")]
    child = here.workers.program(str(CHILD), *files)
    assert child.returncode == 0, child.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "report.json").read_text())
    return found


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", CONFIGS)
def test_each_process_holds_what_is_predicted(
    name: str, reports: dict[str, list[dict[str, Any]]]
) -> None:
    config = CONFIGS[name]
    spec = TraceSpec.of(config)
    source = source_of(name)
    traces = trace_all(source, "causal-lm", 8, GPU, [spec], num_gpus=config.num_gpus)
    estimator = Estimator(traces, GPU, memory_budget_bytes=10**9)
    predicted = estimator.estimate(config).per_gpu
    assert predicted is not None
    first, *others = reports[name]
    assert len(others) == config.num_gpus - 1
    assert first["parameters"] == predicted.parameters_bytes
    assert first["gradients"] == predicted.gradients_bytes
    assert first["optimizer_state"] == predicted.optimizer_state_bytes
    for other in others:
        if not config.num_splits > 1:
            assert other["parameters"] == first["parameters"]
            assert other["gradients"] == first["gradients"]
        # The last rows may be missing: moments are not padded, nor are split weights.
        assert other["parameters"] <= first["parameters"]
        assert other["gradients"] <= first["gradients"]
        assert other["optimizer_state"] <= first["optimizer_state"]
    if config.num_splits > 1:
        alone = dataclasses.replace(spec, parallelism="none")
        traces |= trace_all(source, "causal-lm", 8, GPU, [alone])
        assert_same_activations_and_messages(config, traces, first)
    # The buckets are allocated as blocks of 512 bytes.
    buckets = sum(-(-size // 512) * 512 for size in first.get("buckets", []))
    assert buckets == predicted.buffers_bytes


def assert_same_activations_and_messages(
    config: TrainConfig, traces: Any, real: dict[str, Any]
) -> None:
    spec, size, rank = TraceSpec.of(config), config.micro_batch_size, config.lora_rank or 0
    alone = dataclasses.replace(spec, parallelism="none")
    running = traces[alone].running_bytes("again", size, rank)
    assert running[traces[alone].num_forward_events - 1] == real["activations"]
    sent = [
        [message.operation, message.num_bytes]
        for message in traces[spec].exchange(size, rank).messages_per_micro_step
        for _ in range(message.count)
    ]
    assert sorted(sent) == real["sent"]


def test_a_step_that_is_split_has_both_workspaces_of_cublas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "WORKSPACES_ARE_KEPT", True)
    answer = trace_module.trace_step(
        models.load_config(MODEL),
        "causal-lm",
        of_one_gpu(TraceSpec.of(TP)),
        sequence_length=8,
        device=Device(compute_capability=(8, 9), cublas_workspace_bytes=7 * 512),
    )
    trace = Trace(json.loads(json.dumps(answer)))
    sizes = trace.sizes(TP.micro_batch_size, 0)
    assert [sizes[number] for number in trace.workspaces] == 2 * [7 * 512]


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_keeps_and_sends_what_is_predicted_and_learns_as_one_process(
    name: str, reports: dict[str, list[dict[str, Any]]]
) -> None:
    """The first process has the most; the last takes no mask for needed, and copies no merged result."""
    config = RINGS[name]
    spec, size = TraceSpec.of(config), config.micro_batch_size
    first, *others = reports[name]
    for has_last_part, held in ((True, others[-1]), (False, first)):
        answer = trace_module.trace_step(
            models.load_config(MODEL),
            "causal-lm",
            dataclasses.replace(of_one_gpu(spec), has_last_part=has_last_part),
            sequence_length=config.sequence_length,
            device=Device(compute_capability=(8, 9), cublas_workspace_bytes=0, backend="cpu"),
        )
        trace = Trace(json.loads(json.dumps(answer)))
        running = trace.running_bytes("again", size, 0)
        assert running[trace.num_forward_events - 1] == held["activations"]
    sent = [
        [launch.kernel.name, launch.bytes_moved]
        for launch in trace.launches(size, 0)
        if launch.kernel.name in COLLECTIVES
        for _ in range(launch.count)
    ]
    assert sorted(sent) == first["sent"]
    assert {name for name, _ in sent} == {"all_gather", "permute"}
    assert others[-1]["activations"] < first["activations"]
    for other in others:
        assert other["activations"] <= first["activations"]
        assert other["sent"] == first["sent"]
    assert all(report["error"] < 1e-5 for report in reports[name])


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("task", OUTPUTS)
def test_ddp_clones_what_the_model_returns_where_it_looks_for_unused_parameters(
    task: str, find_unused: bool, reports: dict[str, list[dict[str, Any]]]
) -> None:
    """Kept for the backward pass, and the most of the forward pass, to the byte."""
    spec = TraceSpec.of(dataclasses.replace(DDP, precision="fp32", attention="eager"))
    answer = trace_module.trace_step(
        models.load_config(OUTPUTS[task][1]),
        task,
        of_one_gpu(spec),
        sequence_length=8,
        device=Device(compute_capability=(8, 9), cublas_workspace_bytes=0, backend="cpu"),
    )
    trace = Trace(json.loads(json.dumps(answer)))
    is_checkpointed = dataclasses.replace(spec, activation_checkpointing=int(not find_unused))
    shared = RankTrace(trace, is_checkpointed, num_gpus=2, on_card=False)
    assert trace.returned is not None
    (end,) = (n for n, event in enumerate(shared.again) if event == trace.returned.after)
    num_cloned = len(trace.returned.tensors) if find_unused else 0
    taken = shared.running_bytes("again", 2, 0)[: end + 1 + num_cloned]
    for report in reports[f"{task}-{find_unused}"]:
        assert report["most"] == max(taken)


@pytest.mark.parametrize("find_unused", [False, True])
def test_ddp_makes_these_buckets(
    find_unused: bool, reports: dict[str, list[dict[str, Any]]]
) -> None:
    weights = [Weight(shape=shape, dtype=dtype, trainable=True, group=0) for shape, dtype in SHAPES]
    predicted = ddp_buckets(weights) if find_unused else ddp_rebuilt_buckets(weights[::-1])
    for report in reports[f"buckets-{find_unused}"]:
        assert sorted(report["buckets"]) == sorted(predicted)
    assert len(predicted) >= 4


@pytest.mark.parametrize("name", FSDP2_RUNS)
def test_what_fsdp2_does_not_run_is_known(
    name: str, reports: dict[str, list[dict[str, Any]]]
) -> None:
    _, why = FSDP2_RUNS[name]
    said = {"": "", "its weight": "is shared with a parameter", "its buffer": "'device_mesh'"}
    for report in reports[name]:
        assert report["why"].startswith(why)
        assert bool(report["why"]) == bool(report["problem"]) == bool(why), report
        assert said[why[:10]] in report["problem"]


@pytest.mark.usefixtures("forked_workers")
def test_a_model_with_a_weight_of_two_groups_is_refused_under_fsdp2_alone() -> None:
    source = dataclasses.replace(SOURCE, config=FSDP2_RUNS["BertForMaskedLM"][0])
    specs = {
        name: dataclasses.replace(TraceSpec.of(FSDP2), parallelism=name)
        for name in ("fsdp2", "fsdp2-offload", "ddp", "zero3")
    }
    refused: dict[TraceSpec, str] = {}
    ask = functools.partial(trace_all, source, "masked-lm", 8, GPU, num_gpus=2, refused=refused)
    assert {spec.parallelism for spec in ask(specs.values())} == {"ddp", "zero3"}
    assert {spec.parallelism for spec in refused} == {"fsdp2", "fsdp2-offload"}
    with pytest.raises(
        ConfigError, match=r"Its weight cls.predictions.bias is cls.*decoder.bias"
    ) as caught:
        ask([specs["fsdp2"]])
    assert caught.value.remedy == "Take another way to share: --parallelism ddp or zero3"


def test_bitsandbytes_does_not_take_what_fsdp2_shards(
    reports: dict[str, list[dict[str, Any]]],
) -> None:
    assert "adamw_bnb_8bit" not in PARALLELISMS["fsdp2"].optimizers
    for report in reports["fsdp2-8bit"]:
        assert "DTensor" in report["problem"]


def test_fused_adam_does_not_take_weights_of_which_some_are_split(
    reports: dict[str, list[dict[str, Any]]],
) -> None:
    assert "adamw_torch_fused" not in PARALLELISMS["tp"].optimizers
    for report in reports["tp-fused"]:
        assert "mixed torch.Tensor and DTensor" in report["problem"]


GPT2 = {"model_type": "gpt2", "vocab_size": 67, "n_embd": 48, "n_layer": 2, "n_head": 4}
OPT = {**MODEL, "model_type": "opt", "ffn_dim": 130, "word_embed_proj_dim": 48}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it.
@pytest.mark.parametrize(
    ("model", "is_adapted", "left"),
    [
        (MODEL, False, set()),
        # Accelerate looks for the last norm beside the head then.
        (MODEL, True, {"norm.weight"}),
        (GPT2, False, {"wpe.weight"}),
        # Its norm is a decoder's.
        (
            OPT,
            False,
            {"embed_positions.weight", "final_layer_norm.weight", "final_layer_norm.bias"},
        ),
    ],
    ids=["llama", "lora", "gpt2", "opt"],
)
def test_what_is_in_no_other_unit_is_left_to_the_root(
    model: dict[str, Any], is_adapted: bool, left: set[str]
) -> None:
    with torch.device("meta"):
        built: Any = AutoModelForCausalLM.from_config(models.load_config(model))
        if is_adapted:
            built = peft.get_peft_model(built, peft.LoraConfig(target_modules="all-linear"))
    found = models.left_to_root(built)
    names = {name for name, parameter in built.named_parameters() if id(parameter) in found}
    outside = {name for name in names if not re.search(r"\.\d+\.", name)}
    assert {".".join(name.split(".")[-2:]) for name in outside} == left


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it.
@pytest.mark.parametrize("targets", ["all-linear", "v_proj,down_proj"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_adapters_are_dealt_out_behind_what_they_adapt(targets: str, has_bias: bool) -> None:
    """In the order of the model's state, as accelerate goes through it."""
    loaded = models.load_config({**MODEL, "attention_bias": has_bias})
    config = dataclasses.replace(CONFIGS["fsdp2-lora"], lora_targets=targets)
    spec = of_one_gpu(TraceSpec.of(config))
    answer = trace_module.trace_step(
        loaded,
        "causal-lm",
        spec,
        sequence_length=8,
        device=Device(compute_capability=(8, 9), cublas_workspace_bytes=0),
    )
    shares = Shares(
        Trace(json.loads(json.dumps(answer))).parameters(),
        TraceSpec.of(config),
        num_gpus=2,
        hidden_size=MODEL["hidden_size"],
        is_one_unit=False,
    )
    with torch.device("meta"):
        built: Any = AutoModelForCausalLM.from_config(loaded)
    modules: Any = targets if targets == "all-linear" else targets.split(",")
    adapted = peft.get_peft_model(built, peft.LoraConfig(r=3, target_modules=modules))
    found = [shares.weights(3)[position].shape for position in shares.by_module]
    assert found == [tuple(weight.shape) for weight in adapted.state_dict().values()]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("model", "num_gpus", "targets", "words"),
    [
        (MODEL, 5, None, "Its 24 attention heads do not divide by 5 GPUs"),
        ({**MODEL, "num_key_value_heads": 3}, 2, None, "Its 3 key-value heads do not divide"),
        (GPT2, 2, None, "Transformers has no tensor parallel plan for gpt2"),
        (MODEL, 2, "o_proj", "PEFT cannot adapt o_proj, which is split by its rows"),
    ],
    ids=["heads", "key-value heads", "no plan", "rows"],
)
def test_a_model_that_cannot_be_split_is_refused(
    model: dict[str, Any], num_gpus: int, targets: str | None, words: str
) -> None:
    config = dataclasses.replace(TP, num_gpus=num_gpus)
    if targets is not None:
        config = dataclasses.replace(config, method="lora", lora_rank=3, lora_targets=targets)
    source = dataclasses.replace(SOURCE, config=model)
    with pytest.raises(ConfigError, match=words) as caught:
        trace_all(source, "causal-lm", 8, GPU, [TraceSpec.of(config)], num_gpus=num_gpus)
    assert caught.value.remedy == (
        "Take another way to share (--parallelism fsdp2), or another --num-gpus"
    )


def test_peft_still_cannot_adapt_what_is_split_by_rows(
    reports: dict[str, list[dict[str, Any]]],
) -> None:
    for report in reports["tp-lora-rows"]:
        assert "is invalid for input of size" in report["problem"]
