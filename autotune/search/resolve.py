"""The way from a Question to a Problem: everything that it names, read and checked against each other.

A question that has come from another machine brings what only that one could read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass

from autotune.catalogue import nvml
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.catalogue.models import resolve as find_model
from autotune.catalogue.tasks import PICTURES
from autotune.common.user_text import printable
from autotune.errors import AutotuneError, ConfigError
from autotune.export.base import own_run
from autotune.export.base.read import BaseRun, model_in
from autotune.probe import compiled
from autotune.records.question import BACKENDS, EFFECTIVE_BATCH_SIZE, SEQUENCE_LENGTH, Question
from autotune.search import budget, nearest_base
from autotune.search.budget import CHOOSERS, CardSource, ChosenCard, choose_card
from autotune.search.dataset import note_unread, read_dataset
from autotune.search.pictures import read_pictures, task_of
from autotune.search.teacher import read_teacher
from autotune.space import space_file
from autotune.space.adapters import ADAPTERS, BESIDE_OUT_PROJ, WITHOUT_OUT_PROJ
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.defaults import completions_of, default_base
from autotune.space.headroom import NO_HEADROOM
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.space.search_space import (
    SearchSpace,
    as_in_base,
    may_pack,
    unlisted,
    usual_batching,
    with_divisors,
    with_fixed_segments,
    with_peft,
)
from autotune.space.space_changes import Changing, SpaceChange
from autotune.space.trainers import TRAINERS, task_of_format, trainers_of
from autotune.store import study_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A question resolved: all that a search needs, read and checked."""

    question: Question
    source: ModelSource
    card: ChosenCard
    workload: Workload
    space: SearchSpace
    changes: tuple[SpaceChange, ...]
    """Changes of the space that was named, in order."""
    run: BaseRun | None
    """The run that the user trains with so far."""
    base: TrainConfig | None
    """Its configuration, as the search compares with it; None: TrainingArguments' defaults."""
    backend: str | None
    """The backend that probes run on, one of BACKENDS; None: nothing is measured."""
    reads_dataset: bool
    """Whether the dataset is here, so that its loader can be timed."""

    @property
    def trains_elsewhere(self) -> bool:
        """Whether the user's run needs nothing of this machine: what it needs is there already."""
        return self.backend is None and self.run is not None and self.run.target is not None

    def predicted(self) -> Problem:
        """The same with nothing measured, so that the answer leaves the room that a prediction needs."""
        workload = dataclasses.replace(
            self.workload, headroom=budget.headroom_of(self.question, self.card.budget_bytes)
        )
        return dataclasses.replace(self, backend=None, workload=workload)

    @property
    def study(self) -> str:
        """The name of the study of a prediction; that of a measurement says so, too."""
        # Only a planned card follows from the budget; another one needs a study of its own.
        is_planned = self.card.source is CardSource.PLANNED
        # A checkpoint that is quantised already leaves fewer methods than were asked for.
        asked = _methods(self.question) or METHODS
        workload = dataclasses.replace(self.predicted().workload, methods=asked)
        name = study_names.default_study_name(
            workload, gpu=None if is_planned else self.card.gpu.name
        )
        own_values = unlisted(self.space, self.workload.methods)
        if self.question.peft is not None:
            own_values.pop("peft", None)
            name += f"-{hashlib.sha256(self.question.peft.encode()).hexdigest()[:6]}"
        if own_values:
            name += f"-{hashlib.sha256(json.dumps(own_values).encode()).hexdigest()[:6]}"
        return name


def resolve(
    question: Question,
    *,
    card: ChosenCard | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Problem:
    """Look up everything that the question names, and check that it goes together.

    `card` None: chosen here. Raises ConfigError for what cannot be read or used, HardwareError, WorkerError.
    """
    _check_model_is_named(question)
    if card is None:
        card = _chosen_card(question, note)
    if question.study is not None:
        study_names.check_name(question.study)  # Before minutes are spent on its answer.
    note_unread(question, note)
    changing = _named_space(question, card.gpu)
    run = read_run(question, card.gpu, note=note)
    base = None if run is None else run.config
    if run is not None and run.uncarried:
        note(f"{run.path.name}: only its edited copy keeps {', '.join(run.uncarried)}.")
    source = find_model(_model_of(question, run))
    _note_card(source, card.gpu, base, note)
    asked = _for_task(question, run, source, note)
    base = _no_longer_than_possible(asked, base)
    num_gpus, length, batch = _agreed_sizes(asked, base)
    if question.space in space_file.names():
        why = f"an effective batch of {batch:,}"
        changing.to(with_divisors(changing.space, batch // num_gpus), why)
    budget.check_shared_probes(question.backend, num_gpus, card)
    _check_pictures(asked)
    length = _possible_length(asked.source, length, note)
    _note_unpacked(asked.source, note)
    budget.check_length(asked.task, length)
    workload = _of_samples(asked, card, length, base, lambda task: may_pack(changing.space, task))
    if run is not None and base is not None:
        base = _search_around(changing, run, base, workload)
    methods = budget.methods_for(asked.source, _methods(question) or METHODS)
    backend = _backend_of(question, card, num_gpus)
    space_file.require_method(changing.space, methods)
    targets = question.settings.get("lora_targets", "all-linear")
    _note_out_proj(asked.source, methods, targets, note)
    workload = dataclasses.replace(
        workload,
        effective_batch_size=batch,
        methods=methods,
        # What is measured needs no room beyond its own.
        headroom=budget.headroom_of(question, card.budget_bytes)
        if backend is None
        else NO_HEADROOM,
        host_memory_bytes=budget.host_memory_of(question),
        num_gpus=num_gpus,
    )
    if base is not None:
        what = f"The configuration of {question.base}"
        budget.check_rules(base, workload, card.gpu, asked.source, what=what)
    return Problem(
        question=question,
        source=asked.source,
        card=card,
        workload=workload,
        space=changing.space,
        changes=tuple(changing.changes),
        run=run,
        base=base,
        backend=backend,
        reads_dataset=workload.dataset is not None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One configuration that a question fixes, and what it is asked of."""

    source: ModelSource
    card: ChosenCard
    workload: Workload
    config: TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A question with the run and the model that it names, and the task that this is trained for."""

    question: Question
    run: BaseRun | None
    source: ModelSource
    task: str
    note: Callable[[str], None]


def _chosen_card(question: Question, note: Callable[[str], None]) -> ChosenCard:
    card = CHOOSERS.get(question.backend, choose_card)(question.gpu, question.gpu_mem)
    if card.is_here and card.note:
        note(f"{card.gpu.name}, {card.why}")
    return card


def _named_space(question: Question, card: Gpu) -> Changing:
    """Return the space that is named, with what other options and the machine make of it."""
    changing = Changing(space_file.load(question.space))
    if question.peft is not None:
        changing.to(with_peft(changing.space, question.peft), "--peft")
    if question.compile_mode is not None:
        changing.to(compiled.with_mode(changing.space, question.compile_mode), "--compile")
    if card.in_wsl and question.space in space_file.names():
        changing.to(with_fixed_segments(changing.space), "WSL 2")
    return changing


def _for_task(
    question: Question, run: BaseRun | None, source: ModelSource, note: Callable[[str], None]
) -> _Asked:
    """Return what is asked, with the model for the task that it is trained for. Raises ConfigError."""
    of_base = "" if run is None else TRAINERS[run.config.trainer].task or run.task
    task = source.own_task(task_of(question, of_base or source.task))
    source = budget.for_task(source, task)
    _note_cached(source, note)
    return _Asked(question=question, run=run, source=source, task=task, note=note)


def _agreed_sizes(asked: _Asked, base: TrainConfig | None) -> tuple[int, int | None, int]:
    """Return the number of GPUs, the length and the effective batch, where question and base agree.

    The length is None where neither says it. Raises ConfigError.
    """
    question, task = asked.question, asked.task
    num_gpus, length, batch = question.num_gpus, question.seq_len, question.effective_batch
    has_lengths = budget.has_lengths(task, length)
    if base is not None:
        num_gpus = budget.agreed("--num-gpus", num_gpus, base.num_gpus)
        if has_lengths:
            length = budget.agreed("--seq-len", length, base.sequence_length)
        batch = budget.agreed("--effective-batch", batch, base.effective_batch_size)
    num_gpus = num_gpus or 1
    batch = budget.shared_batch(batch or EFFECTIVE_BATCH_SIZE, num_gpus, task)
    return num_gpus, length if has_lengths else 1, batch


def _of_samples(
    asked: _Asked,
    card: ChosenCard,
    length: int,
    base: TrainConfig | None,
    packs: Callable[[str], bool],
) -> Workload:
    """Return the workload as far as samples of no more than that length decide it.

    `packs`: whether samples of a task may be packed, so that the length stays. Raises ConfigError and
    WorkerError.
    """
    question, source, task, note = asked.question, asked.source, asked.task, asked.note
    teacher = read_teacher(question, source, task, None if asked.run is None else asked.run.teacher)
    pictures, lengths = read_pictures(question, source, task, length, note=note)
    length = budget.length_of_texts(question, source, pictures, task, length, note)
    dataset = None
    if lengths is not None:
        length = budget.longest_batch(lengths, length, packs=False, note=note)
    if question.dataset is not None and (pictures is None or not pictures.is_in_text):
        beside = _completion(question, task, length, base)
        dataset, lengths = read_dataset(question, source, task, length, beside=beside, note=note)
        task = task_of_format(task, dataset.format)
        stays = packs(task) or _is_short(task, length)
        length = budget.longest_batch(lengths, length, packs=stays, note=note)
    _note_untrained_positions(source, length, note)
    return Workload(
        model=source.name,
        task=task,
        sequence_length=length,
        lengths=lengths,
        pictures=pictures,
        teacher=teacher,
        dataset=dataset,
        memory_budget_bytes=card.budget_bytes,
        extra_arguments="{}" if asked.run is None else asked.run.extra_arguments,
    )


def _search_around(
    changing: Changing, run: BaseRun, base: TrainConfig, workload: Workload
) -> TrainConfig:
    """Change the space to what the run's trainer can be told; return the base to compare with."""
    base = dataclasses.replace(base, sequence_length=workload.sequence_length)
    changing.to(as_in_base(changing.space, base), "the base's values")
    space, base = own_run.searched(
        changing.space, run, base, workload.task, has_lengths=workload.lengths is not None
    )
    changing.to(space, "around the base")
    return base


def _backend_of(question: Question, card: ChosenCard, num_gpus: int) -> str | None:
    """Return the backend that probes run on; None: nothing is measured."""
    has_all = num_gpus == 1 or len(nvml.alike()) >= num_gpus
    if question.backend == "auto" and card.is_here and has_all:
        return "cuda"
    return question.backend if question.backend in BACKENDS else None


def _completion(question: Question, task: str, length: int, base: TrainConfig | None) -> int:
    """Tokens of a completion behind each prompt; 0 where samples are no prompts."""
    name = "max_completion_length"
    usual = completions_of(TRAINERS[trainers_of(task)[0]], length)
    of_base = None if base is None else base.max_completion_length
    found: int = question.settings.get(name) or of_base or usual.get(name, 0)
    return found


def _is_short(task: str, length: int) -> bool:
    """Whether completions take half of a sequence, so that they would be shorter in a shorter one."""
    generates = TRAINERS[trainers_of(task)[0]].generates
    return generates is not None and generates.max_completion_length >= length


def resolve_configuration(
    question: Question, *, note: Callable[[str], None] = lambda _: None
) -> Configuration:
    """Look up the model, the card and the dataset of a question about one configuration.

    Its settings are the question's; what it does not set is the base's, else as by default. Raises
    ConfigError for what cannot work, HardwareError, WorkerError.
    """
    given = dict(question.settings)
    _check_model_is_named(question)
    note_unread(question, note)
    card = choose_card(question.gpu, question.gpu_mem)
    run = read_run(question, card.gpu, note=note)
    base = None if run is None else _overruled(run.config, question)
    (method,) = question.methods or ("peft" if "peft" in given else "full",)
    method = method if base is None else base.method
    source = find_model(_model_of(question, run))
    budget.methods_for(source, (method,))
    asked = _for_task(question, run, source, note)
    source = asked.source
    _check_pictures(asked)
    base = _no_longer_than_possible(asked, base)
    num_gpus = question.num_gpus or (1 if base is None else base.num_gpus)
    of_file = None if base is None else base.sequence_length
    length = question.seq_len or of_file or SEQUENCE_LENGTH
    if not budget.has_lengths(asked.task, question.seq_len):
        length = 1
    is_given = question.seq_len is not None or of_file is not None
    length = budget.possible_length(source, length, is_given=is_given)
    budget.check_length(asked.task, length)
    _note_unpacked(source, note)

    def packs(task: str) -> bool:
        usual = usual_batching(task) if base is None else base.batching
        return bool(given.get("batching", usual) == "packed")

    workload = _of_samples(asked, card, length, base, packs)
    parallelism = PARALLELISMS[given.get("parallelism", "none" if num_gpus == 1 else "ddp")]
    trainer = TRAINERS[trainers_of(workload.task)[0]]
    samples = given.get("micro_batch_size", trainer.least_micro_batch)
    samples *= parallelism.data_parallel_size(num_gpus)
    fewest = trainer.times_to_whole_groups(samples, given.get("num_generations"))
    accumulation = question.accumulation or fewest
    workload = dataclasses.replace(
        workload,
        effective_batch_size=samples * accumulation if base is None else base.effective_batch_size,
        methods=(method,),
        headroom=budget.headroom_of(question, card.budget_bytes),
        host_memory_bytes=budget.host_memory_of(question),
        num_gpus=num_gpus,
    )
    if base is None:
        config = dataclasses.replace(
            default_base(workload, card.gpu, source, parallelism=given.get("parallelism")),
            gradient_accumulation_steps=accumulation,
            **given,
        )
    else:
        config = dataclasses.replace(base, sequence_length=workload.sequence_length)
    if PRECISIONS[config.precision].compute_dtype == "float16":
        _note_overflow(source, note)
    _note_out_proj(source, (config.method,), config.lora_targets, note)
    checked = config
    if config.activation_checkpointing == SOLVE:
        # Any plan must be possible.
        checked = dataclasses.replace(
            config, activation_checkpointing=1, checkpoint_plan="recompute", checkpoint_layers=1
        )
    budget.check_rules(
        checked, workload, card.gpu, source, what="This configuration", is_estimate=True
    )
    return Configuration(source=source, card=card, workload=workload, config=config)


def _overruled(base: TrainConfig, question: Question) -> TrainConfig:
    """Return the base with what was typed beside it. Raises ConfigError for another method."""
    given = dict(question.settings)
    (method,) = question.methods or ("peft" if "peft" in given else base.method,)
    if method != base.method:
        raise ConfigError(
            f"--method is {method}, and {question.base} has {base.method}",
            why="Its other settings are those of its own method",
            remedy="Leave --method out, or ask without --base",
        )
    number = question.num_gpus or base.num_gpus
    if number != base.num_gpus:
        several = "ddp" if base.parallelism == "none" else base.parallelism
        given.setdefault("parallelism", several if number > 1 else "none")
    if question.accumulation is not None:
        given["gradient_accumulation_steps"] = question.accumulation
    if question.seq_len is not None:
        given["sequence_length"] = question.seq_len
    return dataclasses.replace(base, num_gpus=number, **given)


def _check_pictures(asked: _Asked) -> None:
    run, task = asked.run, asked.task
    if task == PICTURES and run is not None and run.target is not None:
        raise ConfigError(
            f"{asked.question.base} cannot be a base of the task {task}",
            why="no file of another trainer is read as training on pictures",
            remedy="Give a train_config.yaml that autotune has written for it, or ask without --base",
        )


def read_run(question: Question, card: Gpu, *, note: Callable[[str], None]) -> BaseRun | None:
    """The run of the question' base; None where they name none. Raises ConfigError."""
    if question.base is None:
        return None
    methods = _methods(question)
    with contextlib.suppress(AutotuneError):  # It is said below.
        method = methods[0] if len(methods) == 1 else "full"
        named = question.model or model_in(question.base, method=method, task=question.task)
        if named is not None:
            # The Hub is asked now: dtype and targets that a file leaves to the model depend on it.
            find_model(named)
    run = own_run.read_run(
        question.base,
        seq_len=question.seq_len,
        methods=methods,
        num_gpus=question.num_gpus or 1,
        effective_batch=question.effective_batch or EFFECTIVE_BATCH_SIZE,
        has_bf16=card.has_bfloat16,
        usual_length=SEQUENCE_LENGTH,
        model=question.model,
        task=question.task,
        note=note,
    )
    return nearest_base.on_card(run, card, note)


def _methods(question: Question) -> tuple[str, ...]:
    """In the order of METHODS, however they were typed: the first is what the defaults would train."""
    given = question.methods if question.peft is None else (*question.methods, "peft")
    return tuple(method for method in METHODS if method in given)


def _check_model_is_named(question: Question) -> None:
    """Refuse a question that names neither a model nor a file that may: before the card is looked up."""
    if question.base is None:
        _model_of(question, None)


def _model_of(question: Question, run: BaseRun | None) -> str:
    model = question.model or (None if run is None else run.model)
    if model is None:
        raise ConfigError(
            "There is no model",
            why="No file that names one was given" if run is None else f"{run.path} names none",
            remedy="Give --model with a Hub id, a folder or a config.json (autotune models)",
        )
    return model


def _no_longer_than_possible(asked: _Asked, base: TrainConfig | None) -> TrainConfig | None:
    """Return the base, whose length is what the model is made for where neither it nor the question says."""
    run = asked.run
    if base is None or run is None or run.has_length or asked.question.seq_len is not None:
        return base
    length = _possible_length(asked.source, None, asked.note)
    return dataclasses.replace(base, sequence_length=length)


def _possible_length(source: ModelSource, length: int | None, note: Callable[[str], None]) -> int:
    possible = budget.possible_length(
        source, length or SEQUENCE_LENGTH, is_given=length is not None
    )
    if possible != (length or SEQUENCE_LENGTH):
        note(
            f"{source.short_name} has positions for {possible} tokens: --seq-len {possible} is taken."
        )
    return possible


def _note_card(
    source: ModelSource, card: Gpu, base: TrainConfig | None, note: Callable[[str], None]
) -> None:
    """Say what float16 may do where the card, or the base, makes it so; and what else the card calls for."""
    if base is not None:
        if PRECISIONS[base.precision].compute_dtype == "float16":
            _note_overflow(source, note)
        return
    if not card.has_bfloat16 and not source.is_float32:
        note(
            f"{card.name} has no bfloat16 (it came with compute capability 8.0): float16 with loss scaling "
            "is searched instead."
        )
    if not card.has_bfloat16:
        _note_overflow(source, note)
    if card.advice:
        note(f"{card.name}: {card.advice}")


OVERFLOWING = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
"""Families made in bfloat16 whose losses have become nan in float16 (transformers issues 5651, 23918)."""


def _note_overflow(source: ModelSource, note: Callable[[str], None]) -> None:
    """Warn of float16 for a family whose values have left its range."""
    if source.config["model_type"] in OVERFLOWING:
        note(
            f"Values of {source.short_name} may leave float16's range, so that losses become nan "
            "(transformers issue 23918): look at the first ones where fp16 is chosen; fp32 "
            "and bfloat16 are safe."
        )


def _note_cached(source: ModelSource, note: Callable[[str], None]) -> None:
    """Say that the configuration is not the catalogue's, whose name was typed."""
    if source.differs_in:
        first = ", ".join(printable(key) for key in source.differs_in[:3])
        more = ", ..." * (len(source.differs_in) > 3)
        note(
            f"The configuration of {source.short_name} is that of the Hub's cache, which differs from the "
            f"catalogue's ({first}{more})."
        )


def _note_unpacked(source: ModelSource, note: Callable[[str], None]) -> None:
    """Say that a quantised checkpoint trains in 16 bits: it takes several times the memory of its files."""
    if source.checkpoint is not None and source.checkpoint.unpacked_by is not None:
        note(
            f"The checkpoint of {source.short_name} is quantised, and is unpacked into 16 bits as it is "
            f"loaded ({source.checkpoint.unpacked_by}): its weights take more memory than its files."
        )


def _note_out_proj(
    source: ModelSource, methods: Collection[str], targets: object, note: Callable[[str], None]
) -> None:
    """Say that LoRA has none of the layers that PEFT refuses."""
    kind = source.config["model_type"]
    is_lora = any(name in ADAPTERS and ADAPTERS[name].peft_type == "LORA" for name in methods)
    if is_lora and targets in BESIDE_OUT_PROJ and kind in WITHOUT_OUT_PROJ:
        note(f"LoRA leaves out_proj out: PEFT adapts none in models of type {kind}.")


def _note_untrained_positions(
    source: ModelSource, length: int, note: Callable[[str], None]
) -> None:
    """Warn of a length beyond the positions that the model was made for."""
    positions = source.positions
    if positions is not None and length > positions:
        note(
            f"{length:,} tokens are more than the {positions:,} positions that {source.short_name} is made "
            "for (max_position_embeddings): without RoPE scaling it knows nothing of later ones."
        )
