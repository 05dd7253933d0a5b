"""Workers that refuse, die or talk late, and what trace_all makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from ends import ended

from autotune.catalogue import installed
from autotune.catalogue.gpus import catalogue, find_gpu
from autotune.errors import ConfigError, HardwareError, WorkerError
from autotune.memory.traces import Trace
from autotune.predict import trace_servers, tracing
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.trace_jobs import MAX_PARAMETERS
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.media import Media
from autotune.space.parallelisms import PARALLELISMS
from autotune.store import trace_cache
from autotune.store.trace_cache import TraceCache

FULL = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=tiny_model.SEQUENCE_LENGTH,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)


class Worker:
    """Stands in for the worker processes: answers each job as told."""

    def __init__(self, answer: Any, how: str = "ok") -> None:
        self.answer = answer
        self.how = how
        self.requests: list[Any] = []

    def __call__(self, verb: str, requests: Any, *, on_answer: Any, **limits: Any) -> Any:
        # Each answer begins the wait for the next one anew.
        assert limits == {"deadline_seconds": tracing.DEADLINE_SECONDS, "answers_renew": True}
        self.requests += requests
        for request in requests:
            for job in request["traces"]:
                on_answer({"id": job["id"], **self.answer})
        return tuple(self for _ in requests)

    def to_error(self, verb: str) -> WorkerError:
        return WorkerError(f"The {verb} process {self.how}")


@pytest.mark.slow
def test_a_server_for_traces_traces_again_without_importing_again() -> None:
    """The traces are those of a process of their own, and of a server with everything."""
    first, second = (
        TraceSpec.of(dataclasses.replace(FULL, activation_checkpointing=every)) for every in (0, 1)
    )
    found: dict[TraceSpec, Any] = {}
    with trace_servers.trace_server([first, second]) as server:
        pids = []
        for spec in (first, second):
            trace_all(
                *(
                    tiny_model.MODEL,
                    "causal-lm",
                    tiny_model.SEQUENCE_LENGTH,
                    tiny_model.gpu(),
                    [spec],
                ),
                server=server,
                found=found,
            )
            pids.append(server.server_pid)
    assert pids[0] is not None
    assert pids == [pids[0]] * 2
    for spec, traced in found.items():
        as_usual = tiny_model.traces()[spec]
        assert traced.first == as_usual.first
        assert traced.sizes(2, 0) == as_usual.sizes(2, 0)
        assert traced.launches(2, 0) == as_usual.launches(2, 0)


def test_a_card_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker({"unsupported": "asked although the card has no CUDA"})
    monkeypatch.setattr(tracing, "run_many", worker)
    amd = next(gpu for gpu in catalogue() if gpu.vendor == "amd")
    with pytest.raises(HardwareError, match=r"no CUDA card"):
        trace_all(tiny_model.MODEL, "causal-lm", 512, amd, {TraceSpec.of(FULL)})
    assert not worker.requests


def test_a_model_that_cannot_be_traced_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "run_many", Worker({"unsupported": "has no layers"}))
    with pytest.raises(ConfigError, match="tiny-llama cannot be traced") as caught:
        trace_all(tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"), {TraceSpec.of(FULL)})
    assert "Has no layers" in str(caught.value)


def of(**changes: Any) -> TraceSpec:
    return TraceSpec.of(dataclasses.replace(FULL, **changes))


@pytest.mark.parametrize(
    ("changes", "pictures", "remedy"),
    [
        ({}, None, "Name another model, method or precision"),
        ({"parallelism": "cp"}, None, "--parallelism fsdp2), or another precision"),
        ({"parallelism": "tp"}, None, "--parallelism fsdp2), or another --num-gpus"),
        ({}, {"seconds": 5.0}, "Give another --audio-seconds"),
        # What has nothing to do with the size of a picture.
        ({}, {}, "Name another model, method or precision"),
    ],
)
def test_what_cannot_be_traced_has_the_option_to_change(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    pictures: dict[str, Any] | None,
    remedy: str,
) -> None:
    monkeypatch.setattr(tracing, "run_many", Worker({"unsupported": "has no layers"}))
    seen = Media(num_images=1, width=384, height=384, num_tokens=0, tensors=())
    sees = None if pictures is None else dataclasses.replace(seen, **pictures)
    model = dataclasses.replace(tiny_model.MODEL, config={"model_type": "vit", "image_size": 224})
    spec = of(num_gpus=2, **changes) if "parallelism" in changes else of(**changes)
    with pytest.raises(ConfigError) as caught:
        trace_all(model, "causal-lm", 512, find_gpu("t4"), {spec}, num_gpus=2, pictures=sees)
    assert f"Has no layers. {remedy}" in str(caught.value).replace(
        "Take another way to share (", ""
    )


@pytest.mark.parametrize(
    ("changes", "of_trace", "why"),
    [
        ({"parallelism": "device-map", "num_gpus": 2}, {}, "cannot be dealt out over 2 GPUs"),
        ({"parallelism": "pp", "num_gpus": 2}, {}, "cannot be dealt out over 2 GPUs"),
        (
            {"parallelism": "fsdp2", "num_gpus": 2},
            {"why_not_fsdp2": "its stacks share weights"},
            "FSDP2 cannot share out tiny-llama. Its stacks share weights. "
            "Take another way to share: --parallelism ddp or zero3",
        ),
        (
            {
                "activation_checkpointing": 1,
                "checkpoint_plan": "recompute",
                "checkpoint_layers": 3,
            },
            {},
            "This plan of checkpointing cannot be predicted for tiny-llama",
        ),
    ],
)
def test_what_does_not_follow_from_a_trace_is_refused_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], of_trace: dict[str, Any], why: str
) -> None:
    """The trace has one weight, and no layers."""
    worker = Worker({"trace": {**some_trace(), **of_trace}})
    monkeypatch.setattr(tracing, "run_many", worker)
    ask = (tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"))
    with pytest.raises(ConfigError) as caught:
        trace_all(*ask, {of(**changes)}, num_gpus=2)
    assert why in str(caught.value)
    alone, shared = of(), of(parallelism="ddp", num_gpus=2)
    told: list[tuple[int, int]] = []
    refused: dict[TraceSpec, str] = {}
    found = trace_all(
        *(*ask, [of(**changes), shared, alone]),
        num_gpus=2,
        on_trace=lambda done, total: told.append((done, total)),
        refused=refused,
    )
    assert set(found) == {alone, shared}
    assert isinstance(found[alone], Trace)
    assert isinstance(found[shared], RankTrace)
    assert refused == {of(**changes): each for each in of_trace.values()}
    # What several GPUs make of a step is no step of its own.
    num_steps = len({tracing.of_one_gpu(spec) for spec in (of(**changes), shared, alone)})
    assert told == [(n, num_steps) for n in range(1, num_steps + 1)]


def test_a_shared_step_is_known_where_that_of_one_gpu_is() -> None:
    sharing = {name: of(parallelism=name, num_gpus=2) for name in ("ddp", "fsdp2", "hsdp", "zero3")}
    for why, known in (("", {*sharing}), ("it has two stacks", {"ddp", "zero3"})):
        traces: dict[TraceSpec, Any] = {of(): Trace({**some_trace(), "why_not_fsdp2": why})}
        for name, spec in sharing.items():
            tracing.share_known(tiny_model.MODEL, spec, find_gpu("t4"), traces, num_gpus=2)
            assert (spec in traces) == (name in known)
    assert isinstance(traces[sharing["ddp"]], RankTrace)
    # Or that of as many that share it in another way.
    others: dict[TraceSpec, Any] = {sharing["zero3"]: traces[sharing["zero3"]]}
    tracing.share_known(tiny_model.MODEL, sharing["ddp"], find_gpu("t4"), others, num_gpus=2)
    assert others[sharing["ddp"]].of_one is traces[of()]
    eager = of(parallelism="zero3", num_gpus=2, attention="eager")
    nothing: dict[TraceSpec, Any] = {SDPA: None, eager: traces[sharing["zero3"]]}
    tracing.share_known(tiny_model.MODEL, sharing["ddp"], find_gpu("t4"), nothing, num_gpus=2)
    assert nothing.keys() == {SDPA, eager}


def test_of_which_step_alone_a_shared_one_is() -> None:
    """FSDP2 gathers 16 bits without autocast; DeepSpeed casts all but codes."""
    cast = {"precision": "bf16-true"}
    for name, row in PARALLELISMS.items():
        for method in ("full", "lora", "qlora"):
            changes: dict[str, Any] = {"method": method, "precision": "bf16-autocast"}
            if method != "full":
                changes |= {"lora_rank": 8, "lora_targets": "all-linear"}
            if method == "qlora":
                changes["quantization"] = "nf4"
            shared, alone = of(parallelism=name, num_gpus=2, **changes), of(**changes)
            is_cast = row.is_fsdp or (name.startswith("zero") and method != "qlora")
            expected = of(**changes | cast | {"adapter_in_base_dtype": method != "full"})
            alike = dataclasses.replace(
                expected if is_cast else alone,
                num_splits=shared.num_splits,
                sequence_parts=shared.sequence_parts,
            )
            assert tracing.of_one_gpu(shared) == alike
            last = [dataclasses.replace(alike, has_last_part=True)] if name == "cp" else []
            assert tracing.of_unlike_gpus(shared) == (alike, *last)
    four = of(parallelism="cp", num_gpus=4)
    assert tracing.of_unlike_gpus(four) == (tracing.of_one_gpu(four),)


def test_a_model_that_no_machine_holds_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for total, why in (
        (MAX_PARAMETERS + 1, f"{MAX_PARAMETERS + 1:,} parameters are more than any machine holds"),
        (MAX_PARAMETERS, ""),
    ):
        weights = [{"stack": 0, "layer": -1, "total": [(total, 0, 0)], "trainable": []}]
        worker = Worker({"trace": {**some_trace(), "parameters": weights}})
        monkeypatch.setattr(tracing, "run_many", worker)
        ask = (tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"), {SDPA})
        if why:
            with pytest.raises(ConfigError, match=why):
                trace_all(*ask)
        else:
            assert set(trace_all(*ask)) == {SDPA}


def test_a_step_that_no_number_counts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = some_trace()
    answer["tensors"][0]["size"] = (2**80, 0, 0)
    monkeypatch.setattr(tracing, "run_many", Worker({"trace": answer}))
    with pytest.raises(ConfigError, match="too large to be counted"):
        trace_all(tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"), {TraceSpec.of(FULL)})


def test_an_attention_that_the_model_lacks_is_an_error_with_one_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers 5.23's Gemma2PreTrainedModel has _supports_sdpa = False."""
    monkeypatch.setattr(tracing, "run_many", Worker({"unsupported": "Please request the support"}))
    gemma = dataclasses.replace(tiny_model.MODEL, name="gemma", config={"model_type": "gemma2"})
    with pytest.raises(ConfigError) as caught:
        trace_all(gemma, "causal-lm", 512, find_gpu("t4"), {SDPA})
    assert str(caught.value) == (
        "gemma cannot be traced. Transformers has no sdpa attention for gemma2. "
        "Give --attention eager."
    )


def test_targets_that_the_model_lacks_are_an_error_with_the_option_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "run_many", Worker({"unsupported": "it has q_proj, v_proj"}))
    lora = dataclasses.replace(FULL, method="lora", lora_rank=8, lora_targets="wrong")
    with pytest.raises(ConfigError, match=r"It has q_proj, v_proj.*with --targets"):
        trace_all(tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"), {TraceSpec.of(lora)})


def test_another_reason_is_not_taken_for_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "run_many", Worker({"unsupported": "has no layers"}))
    gemma = dataclasses.replace(tiny_model.MODEL, name="gemma", config={"model_type": "gemma2"})
    with pytest.raises(ConfigError, match="Has no layers"):
        trace_all(gemma, "causal-lm", 512, find_gpu("t4"), {SDPA, EAGER})


def test_a_worker_that_times_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker({"unsupported": "late"}, how="timeout")
    monkeypatch.setattr(tracing, "run_many", worker)
    with pytest.raises(WorkerError, match="timeout"):
        trace_all(tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"), {TraceSpec.of(FULL)})


def test_what_was_traced_before_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt goes on from there."""
    late = Rounds({"eager": {"trace": some_trace()}, "sdpa": "is late"})
    again = Rounds({"sdpa": {"trace": some_trace()}})

    def ask() -> None:
        trace_all(
            tiny_model.MODEL,
            "causal-lm",
            512,
            find_gpu("t4"),
            {EAGER, SDPA},
            cache=TraceCache(tmp_path),
        )

    monkeypatch.setattr(tracing, "run_many", late)
    with pytest.raises(WorkerError):
        ask()
    monkeypatch.setattr(tracing, "run_many", again)
    ask()
    assert again.asked == [[("sdpa", False)]]


class Rounds:
    """Stands in for the worker processes over several rounds: what each job gets, by round."""

    def __init__(self, *rounds: dict[str, Any]) -> None:
        self.rounds = list(rounds)
        self.asked: list[list[tuple[str, bool]]] = []

    def __call__(self, verb: str, requests: Any, *, on_answer: Any, **_: Any) -> Any:
        answers = self.rounds.pop(0)
        jobs = [job for request in requests for job in request["traces"]]
        self.asked.append([(job["spec"]["attention"], job["whole"]) for job in jobs])
        for job in jobs:
            answer = answers[job["spec"]["attention"]]
            if answer in ("dies", "is late"):
                return (
                    ended(
                        how="crashed" if answer == "dies" else "timeout",
                        code=-9,
                        problem="was killed",
                    ),
                )
            on_answer({"id": job["id"], **answer})
        return (ended(),)


EAGER, SDPA = (
    TraceSpec.of(dataclasses.replace(FULL, attention=name)) for name in ("eager", "sdpa")
)


def some_trace() -> dict[str, Any]:
    """The smallest answer that is a trace: one weight, one tensor that comes and goes."""
    kernel = ["mm", "bfloat16", (2, 1, 0), [(8, 1, 0)], False, 1, []]
    blocks = [
        {
            "phase": "weights",
            "stack": 0,
            "layer": -1,
            "events": [0],
            "accumulate": [],
            "kernels": [],
        },
        {
            "phase": "embed",
            "stack": 0,
            "layer": -1,
            "events": [1, ~1],
            "accumulate": [],
            "kernels": [kernel],
        },
    ]
    weight = {"size": (512, 0, 0), "category": "parameter", "trainable": False}
    return {
        "layers": {"traced": 1, "full": 1, "period": 1},
        "tensors": [weight, {"size": (512, 1, 0)}],
        "blocks": blocks,
        "parameters": [{"stack": 0, "layer": -1, "total": [(256, 0, 0)], "trainable": []}],
    }


def broken_trace() -> dict[str, Any]:
    """A tensor that is freed twice."""
    answer = some_trace()
    answer["blocks"][1]["events"] = [1, ~1, ~1]
    return answer


def trace_both(monkeypatch: pytest.MonkeyPatch, worker: Rounds) -> set[TraceSpec]:
    monkeypatch.setattr(tracing, "run_many", worker)
    return set(trace_all(tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"), {EAGER, SDPA}))


def test_a_trace_is_known_by_its_request_and_the_size_of_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not so one that has its operations besides: nothing that is kept is of it."""

    def identities(card: str, **more: Any) -> dict[str, str]:
        answer = {name: {"trace": some_trace()} for name in ("eager", "sdpa")}
        monkeypatch.setattr(tracing, "run_many", Rounds(answer))
        asked = tiny_model.MODEL, "causal-lm", 512, find_gpu(card), {EAGER, SDPA}
        return {spec.attention: trace.identity for spec, trace in trace_all(*asked, **more).items()}

    found = identities("t4")
    assert identities("t4") == found
    assert len({*found.values(), *identities("rtx-4090").values(), ""}) == 5
    assert identities("t4", operations=True) == {"eager": "", "sdpa": ""}


def test_what_kills_its_process_is_set_aside_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = {"trace": some_trace()}
    worker = Rounds({"eager": "dies", "sdpa": good}, {"sdpa": good})
    assert trace_both(monkeypatch, worker) == {SDPA}
    assert worker.asked == [[("eager", False), ("sdpa", False)], [("sdpa", False)]]


def test_what_kills_a_process_of_the_workers_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "autotune")
    worker = Rounds({"eager": {"died": -11}, "sdpa": {"trace": some_trace()}})
    assert trace_both(monkeypatch, worker) == {SDPA}
    assert "tracing it ended the process: was ended by SIGSEGV" in caplog.text
    with pytest.raises(WorkerError, match="The trace process was ended by SIGKILL"):
        trace_both(monkeypatch, Rounds({"eager": {"died": -9}, "sdpa": {"died": -9}}))


def test_a_crash_of_everything_is_a_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Rounds({"eager": "dies", "sdpa": "dies"}, {"sdpa": "dies"})
    with pytest.raises(WorkerError, match="was killed"):
        trace_both(monkeypatch, worker)


def test_after_three_crashes_there_is_one_round_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attention kills its process: four rounds are made, and the fifth attention is not asked again."""
    names = ("eager", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa")
    specs = {TraceSpec.of(dataclasses.replace(FULL, attention=name)) for name in names}
    worker = Rounds(*[dict.fromkeys(names, "dies")] * 9)
    monkeypatch.setattr(tracing, "run_many", worker)
    with pytest.raises(WorkerError):
        trace_all(tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"), specs)
    assert [len(jobs) for jobs in worker.asked] == [5, 4, 3, 2]


def test_a_trace_that_does_not_repeat_is_asked_for_with_every_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, broken = {"trace": some_trace()}, {"trace": broken_trace()}
    worker = Rounds({"eager": good, "sdpa": broken}, {"sdpa": good})
    assert trace_both(monkeypatch, worker) == {EAGER, SDPA}
    assert worker.asked[1] == [("sdpa", True)]


def test_a_trace_that_never_adds_up_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    good, broken = {"trace": some_trace()}, {"trace": broken_trace()}
    worker = Rounds({"eager": good, "sdpa": broken}, {"sdpa": broken})
    assert trace_both(monkeypatch, worker) == {EAGER}


def test_what_a_worker_answered_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other libraries it is."""
    cache = TraceCache(tmp_path)
    asked = []
    for version in ("1", "1", "2"):
        trace_cache._made_by.cache_clear()
        monkeypatch.setattr(installed, "versions", lambda version=version: (("torch", version),))
        worker = Worker({"unsupported": "has no layers"})
        monkeypatch.setattr(tracing, "run_many", worker)
        with pytest.raises(ConfigError, match="Has no layers"):
            trace_all(
                tiny_model.MODEL,
                "causal-lm",
                512,
                find_gpu("t4"),
                {TraceSpec.of(FULL)},
                cache=cache,
            )
        asked.append(len(worker.requests))
    trace_cache._made_by.cache_clear()
    assert asked == [1, 0, 1]


def test_a_kept_trace_is_read_when_it_is_needed_and_a_spoilt_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"trace": some_trace()}
    cache, asked = TraceCache(tmp_path), []
    for spoilt in (None, None, b"{", b'{"unsupported": 3}'):
        if spoilt is not None:
            monkeypatch.setattr(cache, "find_texts", lambda keys, s=spoilt: dict.fromkeys(keys, s))
        worker = Rounds({"sdpa": good})
        monkeypatch.setattr(tracing, "run_many", worker)
        found = trace_all(tiny_model.MODEL, "causal-lm", 512, find_gpu("t4"), {SDPA}, cache=cache)
        asked.append(len(worker.asked))
        trace = found[SDPA]
        assert isinstance(trace, Trace)
        assert (trace.sizes(2, 0), trace.num_parameters(1)[0]) == ([512, 1024], 256)
    assert asked == [1, 0, 1, 1]


def test_what_is_kept_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for a first answer among half of what is there already."""
    good = {"trace": some_trace()}
    monkeypatch.setattr(tracing, "run_many", Rounds({"eager": good, "sdpa": good}))
    told: list[list[tuple[int, int]]] = []
    for _ in range(2):
        told.append([])
        trace_all(
            tiny_model.MODEL,
            "causal-lm",
            512,
            find_gpu("t4"),
            {EAGER, SDPA},
            on_trace=lambda done, total: told[-1].append((done, total)),
            cache=TraceCache(tmp_path),
        )
    assert told == [[(1, 2), (2, 2)], [(2, 2)]]


def test_cards_that_differ_in_size_share_what_is_kept_but_for_liger_and_compiled_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = find_gpu("rtx-4070"), find_gpu("rtx-4080")
    first, second = (tracing.of_card(card) for card in cards)
    assert {name for name in first if first[name] != second[name]} == {"num_sms", "l2_bytes"}
    older = tracing.of_card(find_gpu("rtx-3060-12gb"))
    assert {name for name in first if first[name] != older[name]} == {"num_sms", "l2_bytes"}
    asked = []
    for changes in ({}, {"liger": True}, {"is_compiled": True}):
        spec = dataclasses.replace(TraceSpec.of(FULL), **changes)
        for card in cards:
            worker = Worker({"unsupported": "has no layers"})
            monkeypatch.setattr(tracing, "run_many", worker)
            with pytest.raises(ConfigError, match="Has no layers"):
                trace_all(
                    tiny_model.MODEL, "causal-lm", 512, card, {spec}, cache=TraceCache(tmp_path)
                )
            asked.append(len(worker.requests))
    assert asked == [1, 0, 1, 1, 1, 1]


def test_a_crash_is_told_by_its_reason_and_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake may be of a moment, or mended: only what a model does not support is remembered."""
    crash = {"crashed": "tracing it failed (KeyError: 7)", "traceback": "File x\nKeyError: 7"}
    worker = Rounds(*2 * [{"eager": {"unsupported": "has no layers"}, "sdpa": crash}])
    monkeypatch.setattr(tracing, "run_many", worker)
    caplog.set_level("INFO", "autotune")
    for _ in range(2):
        caplog.clear()
        with pytest.raises(ConfigError, match="tiny-llama cannot be traced"):
            trace_all(
                tiny_model.MODEL,
                "causal-lm",
                512,
                find_gpu("t4"),
                {EAGER, SDPA},
                cache=TraceCache(tmp_path),
            )
        assert sorted(caplog.messages) == [
            "1 of 2 training steps cannot be traced: has no layers",
            "1 of 2 training steps cannot be traced: tracing it failed (KeyError: 7)",
        ]
    assert worker.asked == [[("eager", False), ("sdpa", False)], [("sdpa", False)]]


def test_the_traceback_of_a_crash_is_in_a_detailed_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crash = {"crashed": "tracing it failed (KeyError: 7)", "traceback": "File x\nKeyError: 7"}
    caplog.set_level("DEBUG", "autotune")
    good = {"trace": some_trace()}
    assert trace_both(monkeypatch, Rounds({"eager": good, "sdpa": crash})) == {EAGER}
    assert caplog.messages[-3:] == [
        "1 of 2 training steps cannot be traced: tracing it failed (KeyError: 7)",
        "File x",
        "KeyError: 7",
    ]


def test_there_is_time_for_something_else_while_a_server_starts(tmp_path: Path) -> None:
    """It is started first, and neither where all is kept."""
    happened: list[str] = []

    class Server:
        def start(self, verb: str) -> None:
            happened.append(f"start {verb}")

        def run(self, verb: str, request: Any, *, on_answer: Any, **_: Any) -> Any:
            happened.append(f"run {verb}")
            for job in request["traces"]:
                on_answer({"id": job["id"], "trace": some_trace()})
            return ended()

    server: Any = Server()
    for _ in range(2):
        trace_all(
            tiny_model.MODEL,
            "causal-lm",
            512,
            tiny_model.gpu(),
            {TraceSpec.of(FULL)},
            server=server,
            cache=TraceCache(tmp_path),
            meanwhile=lambda: happened.append("meanwhile"),
        )
    assert happened == ["start trace", "meanwhile", "run trace"]
