"""The worker: `python -m autotune.worker REQUEST.json RESULT.jsonl` (contract: worker.client.isolate).

The request names a verb and its arguments; each answer is one JSON line. Verbs:

trace   {"config": {...}, "task": str, "sequence_length": int, "compute_capability": [major, minor],
         "cublas_workspace_bytes": int, "num_sms": int, "l2_bytes": int, "backend": "cuda" or "cpu",
         "traces": [{"id": int, "spec": {...}, "whole": bool}], "ahead": bool (may lack)}
        one line per trace: {"id": int, "trace": {...}}; {"id": int, "unsupported": reason}, which will
        never be another; {"id": int, "crashed": reason, "traceback": text}; or {"id": int, "died": exit
        code of the process that traced it}; ahead: {"id": int, "packed": text} of each that a cache may keep
probe   {"config": {...}, "train_config": {TrainConfig}, "spec": {ProbeSpec}, "folder": str (may lack)}
        its temporary files go into the folder; as soon as a file STOP_FILE is in it, whose text says why,
        it times no further step
        lines while it times: {"step": int, "tokens_per_second_at_most": float}; the last line:
        {"measurement": {Measurement}}
fingerprint {"backend": str}
        {"fingerprint": {Fingerprint}}, or {"unusable": why PyTorch cannot use the device}
examine {}
        one line per part of the installation, under its name, with the reason why it cannot be used:
        {"torch": {"problem": str, ...}}, then allocator, card, bitsandbytes, flash_attention
lengths {"dataset": str, "format", "text_field", "answer_field", "loss_on": str or null, "task": str,
         "tokenizer": folder or id}
        {fields of Dataset, "num_samples": int, "counts": [[tokens, samples], ...], "longest": int,
         "vocabulary_size": int where there is a tokenizer}, or {"problem": str, "remedy": str}
pictures {"config": {...}, "processor": {...}, and "num_images": int, "width": int, "height": int, or
         "dataset": str, "folder": folder or id of the model}
        {fields of Media, "measured": null, or of a dataset {fields of PicturesOfDataset},
         "texts": null, or {"num_samples": int, "counts": [[tokens, samples], ...], "longest": int}, or
         {"unread": str}}; or
        {"problem": str}, or of a dataset {"problem": str, "remedy": str}
calibrate {"backend": str, "kernels": [{fields of roofline.Kernel}], "seconds_each": float, "warm_up_seconds":
         float}
        on cuda first {"device": name}; one line per kernel: {"index": int, "seconds": float, "spread": float,
        "num_weights": int} or {"index": int, "skipped": reason}; then {"host": {phase: seconds of an
        operation}, "waited": share of them without a processor}; or {"unusable": reason}
outside {}
        on cuda alone, one line per thing that a process does for the first time: {"did": name,
        "outside_bytes": what the card holds by then beside PyTorch's allocator, "problem": str or null}
profile {"config", "train_config", "spec": as of a probe}
        one optimizer step as PyTorch's profiler sees it, behind others: {"num_micro_steps": int,
        "wall_seconds": float, "busy_seconds": of all kernels and copies, "num_launches": int,
        "num_operations": ATen's, nested ones, too, "operations": [{"name": ATen's, "shapes", "dtypes": of its
        arguments, "kernels": how many it launched, "seconds": theirs}], "kernels": [{"name", "count",
        "seconds"}], "measurement": {Measurement}}, or the measurement alone where the run did not get so far
loader  {"program": text of train.py, "dataset": str, "tokenizer": folder or id, "backend": str,
         "micro_step_seconds": float, "settings": [{fields of LoaderTime}]}
        one line per setting, until one keeps up with the micro-step: {LoaderTime}; or {"problem": str}
"""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from autotune.common import json_lines, json_records
from autotune.records.estimate import SCHEMA_VERSION
from autotune.records.measurement import STOP_FILE, Measurement, ProbeSpec
from autotune.space.config import TrainConfig
from autotune.space.parallelisms import PARALLELISMS
from autotune.worker.client.orphans import die_with_parent

Answers = Iterator[dict[str, Any]]
Verb = Callable[[dict[str, Any]], Answers]


def _trace(request: dict[str, Any]) -> Answers:
    from autotune.records.estimate import TraceSpec
    from autotune.worker.client.libraries import asked_by
    from autotune.worker.trace.imports import import_libraries

    import_libraries(asked_by(TraceSpec(**each["spec"]) for each in request["traces"]))

    if request.get("ahead"):
        from autotune.worker.trace.ahead import traces_ahead

        return traces_ahead(request)
    from autotune.worker.trace.answers import traces

    return traces(request)


def _probe(request: dict[str, Any]) -> Answers:
    import_adapters()

    from autotune.export import accelerate_config
    from autotune.worker.probe import group
    from autotune.worker.probe.group import ALONE, Rank
    from autotune.worker.probe.run import probe

    config, spec = (
        TrainConfig(**request["train_config"]),
        json_records.read(ProbeSpec, request["spec"]),
    )

    folder = request.get("folder")
    stop_file = None if folder is None else Path(folder) / STOP_FILE

    def measure(rank: Rank, on_progress: Callable[[dict[str, Any]], None]) -> Measurement:
        return probe(
            request["config"],
            config,
            spec,
            on_progress,
            folder=folder,
            stop_reason=lambda: "" if stop_file is None else _read_if_there(stop_file),
            rank=rank,
        )

    def alone(on_progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        return {"measurement": measure(ALONE, on_progress).to_dict()}

    if not PARALLELISMS[config.parallelism].is_launched:
        yield from _as_it_comes(alone)
        return
    variables = accelerate_config.launch_environment(config)
    for said in group.run(config.num_gpus, variables, measure):
        yield {"measurement": said.to_dict()} if isinstance(said, Measurement) else said


def _read_if_there(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _fingerprint(request: dict[str, Any]) -> Answers:
    from autotune.memory import alloc_conf
    from autotune.worker.fingerprint import fingerprint

    try:
        found = fingerprint(request["backend"], alloc_conf.here())
        yield {"fingerprint": dataclasses.asdict(found)}
    except (AssertionError, RuntimeError) as error:
        # torch.cuda._lazy_init of 2.13: no CUDA in this build; no driver, one too old, no free card.
        yield {"unusable": str(error).partition("\n")[0]}


def _examine(request: dict[str, Any]) -> Answers:
    from autotune.worker.examine import examine

    yield from examine()


def _lengths(request: dict[str, Any]) -> Answers:
    from autotune.export.samples.values import UnusableData
    from autotune.worker.lengths import count_lengths

    try:
        yield count_lengths(request)
    except UnusableData as error:
        yield {"problem": error.why, "remedy": error.remedy}


def _pictures(request: dict[str, Any]) -> Answers:
    from autotune.export.samples.values import UnusableData
    from autotune.worker.build import model, pictures
    from autotune.worker.dataset_pictures import look_at

    config, processor = request["config"], request["processor"]
    try:
        dataset = request.get("dataset")
        folder = request.get("folder")
        plan = request if dataset is None else look_at(dataset, config, processor, folder)
        asked = {name: plan[name] for name in ("num_images", "width", "height")}
        sizes = plan.get("sizes") or [(asked["width"], asked["height"])] * asked["num_images"]
        made = pictures.tensors_of(model.load_config(config), sizes, processor)
        of_dataset = {name: plan.get(name) for name in ("sizes", "measured", "texts")}
        yield {**asked, **made, **of_dataset}
    except UnusableData as error:
        yield {"problem": error.why, "remedy": error.remedy}
    except model.UnsupportedModel as error:
        yield {"problem": str(error)}


def _loader(request: dict[str, Any]) -> Answers:
    import_adapters()

    from autotune.export.samples.values import UnusableData
    from autotune.worker.probe.loading import time_loaders

    try:
        yield from time_loaders(request)
    except UnusableData as error:
        yield {"problem": str(error)}


def _calibrate(request: dict[str, Any]) -> Answers:
    from autotune.worker.calibrate.timing import time_kernels

    yield from time_kernels(request)


def _outside(_: dict[str, Any]) -> Answers:
    from autotune.worker.calibrate.outside import outside

    yield from outside()


def _profile(request: dict[str, Any]) -> Answers:
    import_adapters()

    from autotune.worker.probe.profiled import profiled

    yield profiled(request)


def _as_it_comes(
    work: Callable[[Callable[[dict[str, Any]], None]], dict[str, Any]],
) -> Answers:
    """Yield what `work` hands out while it runs, then what it returns.

    It runs in a thread: a Trainer calls back and cannot be asked for its next step.
    """
    answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(work, answers.put)
        future.add_done_callback(lambda _: answers.put(None))
        while (answer := answers.get()) is not None:
            yield answer
    yield future.result()


def import_adapters() -> None:
    """Import bitsandbytes and PEFT, which takes long enough without a compiler."""
    from autotune.worker.uncompiled import uncompiled

    with uncompiled():
        import peft  # noqa: F401


VERBS: dict[str, Verb] = {
    "trace": _trace,
    "probe": _probe,
    "fingerprint": _fingerprint,
    "examine": _examine,
    "lengths": _lengths,
    "loader": _loader,
    "pictures": _pictures,
    "calibrate": _calibrate,
    "outside": _outside,
    "profile": _profile,
}


def main() -> None:
    die_with_parent()
    request_file, result_file = sys.argv[1:]
    answer_request(VERBS, request_file, result_file)


def answer_request(verbs: Mapping[str, Verb], request_file: str, result_file: str) -> None:
    """Run the verb that the request names and write its answers.

    Exits on a request of another schema version.
    """
    envelope = json.loads(Path(request_file).read_text(encoding="utf-8"))
    if envelope["schema_version"] != SCHEMA_VERSION:
        sys.exit(f"request has schema version {envelope['schema_version']}, not {SCHEMA_VERSION}")
    with open(result_file, "ab") as results:
        for answer in verbs[envelope["verb"]](envelope["request"]):
            results.write(json_lines.encode(answer) + b"\n")
            results.flush()


if __name__ == "__main__":
    main()
