"""Readers of what was typed: the card, the budget, the length, the base, as a search takes them.

Each function raises ConfigError with what, why and the remedy when the pieces do not go together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml

from autotune.catalogue import gpus, host_memory, nvml
from autotune.catalogue.embeddings import with_modules_behind
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.catalogue.tasks import CAUSAL, CTC, PICTURES, tasks_of
from autotune.common import files
from autotune.common.units import MIB, format_bytes, parse_bytes
from autotune.errors import ConfigError, HardwareError
from autotune.memory.kv_cache import KvCache, kv_cache
from autotune.records.question import Question
from autotune.search.own_rates import with_own_rates
from autotune.search.room import served_by_vllm
from autotune.space.config import TrainConfig, Workload
from autotune.space.headroom import NO_HEADROOM, USUAL_HEADROOM, Headroom
from autotune.space.knobs import KNOBS
from autotune.space.lengths import Lengths
from autotune.space.media import Media
from autotune.space.precisions import PRECISIONS
from autotune.space.rules import Context, broken_rules
from autotune.space.space_file import MAX_FILE_BYTES
from autotune.space.trainers import EMBEDDERS, TRAINERS, model_task, row_of, trainers_of
from autotune.space.yaml_schema import parse_yaml, why_not_yaml


class CardSource(StrEnum):
    """Why a search is for this card."""

    NAMED = "named"
    FILE = "as a file says"
    FOUND = "found here"
    PLANNED = "planned for"
    CLUSTER = "found in the Ray cluster"
    CPU = "real steps on the CPU, bytes by the tracker: no measure of a GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenCard:
    """The card that a search is for, and the budget on it."""

    gpu: Gpu
    source: CardSource
    budget_bytes: int
    note: str = ""
    """A remark on the choice, in words."""
    own_rates: str = ""
    """The day on which the card's own rates were measured, in words; empty where they were not."""

    @property
    def is_here(self) -> bool:
        """Whether probes on CUDA would run on it."""
        return self.source is CardSource.FOUND

    @property
    def why(self) -> str:
        """Why this card, in words."""
        colon = dict.fromkeys((CardSource.PLANNED, CardSource.FILE), ": ")
        between = {**colon, CardSource.FOUND: "; "}.get(self.source, "")
        why = f"{self.source}{between}{self.note}" if self.note else str(self.source)
        staying = "in WSL 2, where paged state stays on the card" if self.gpu.in_wsl else ""
        return "; ".join(filter(None, (why, self.own_rates, staying)))


_Choose = Callable[[str | None, str | None], ChosenCard]


def _in_this_machine(choose: _Choose) -> _Choose:
    """Let the card that is chosen have what this machine's system lets cards have."""

    @functools.wraps(choose)
    def chosen(name: str | None, size: str | None) -> ChosenCard:
        card = choose(name, size)
        gpu = dataclasses.replace(card.gpu, in_wsl=host_memory.in_wsl())
        return dataclasses.replace(card, gpu=gpu)

    return chosen


@_in_this_machine
def choose_card(name: str | None, size: str | None) -> ChosenCard:
    """Choose by what was typed: a name, a size, both. The budget is the size, else all of the card.

    Raises ConfigError, and HardwareError for a card that runs no CUDA.
    """
    budget_bytes = None if size is None else parse_bytes(size)
    if name is not None:
        card = gpus.find_gpu(name)
        if card.compute_capability is None:
            raise HardwareError(
                f"{card.name} does not run CUDA",
                why="What its kernels and its allocator do is not modelled",
                remedy="Name an NVIDIA card (autotune gpus)",
            )
        if budget_bytes is not None and budget_bytes > card.capacity_bytes:
            raise ConfigError(
                f"--gpu-mem {size} ({format_bytes(budget_bytes)}) is more than the {card.name} has",
                why=f"Of its memory {format_bytes(card.capacity_bytes)} can be used",
                remedy="Lower --gpu-mem, leave it out, or name another card",
            )
        is_file = gpus.is_card_file(name)
        return ChosenCard(
            gpu=card,
            source=CardSource.FILE if is_file else CardSource.NAMED,
            budget_bytes=budget_bytes or card.capacity_bytes,
            note=name if is_file else "",
        )
    here = gpus.detect()
    roomy = [card for card in here if budget_bytes is None or budget_bytes <= card.capacity_bytes]
    if roomy:
        # What was calibrated is the first card.
        gpu, own = with_own_rates(roomy[0]) if roomy[0] is here[0] else (roomy[0], "")
        return ChosenCard(
            gpu=gpu,
            source=CardSource.FOUND,
            budget_bytes=budget_bytes or gpu.capacity_bytes,
            own_rates=own,
        )
    if budget_bytes is None:
        raise ConfigError(
            "There is no memory budget",
            why="No CUDA GPU is here whose memory could be taken",
            remedy="Give --gpu-mem 12GB, or --gpu with a card's name (autotune gpus)",
        )
    lacking = "the GPU here has less" if here else "no CUDA GPU is here"
    planned = gpus.for_budget(budget_bytes)
    note = f"{lacking} (--gpu names another)"
    if budget_bytes > planned.capacity_bytes:  # it is sold with as much
        usable = f"of its memory {format_bytes(planned.capacity_bytes)} can be used"
        note += f"; {usable}, less than the budget: --gpu {planned.slug} plans for that"
    return ChosenCard(gpu=planned, source=CardSource.PLANNED, budget_bytes=budget_bytes, note=note)


def cpu_as_card(name: str | None, size: str | None) -> ChosenCard:
    """Take the CPU as the card that probes run on; it has no memory of its own, so a size is needed.

    Raises ConfigError.
    """
    card = gpus.cpu_stand_in()
    if name is not None:
        raise ConfigError(
            "--gpu does not go with --backend cpu",
            why="What the CPU takes says nothing of a card",
            remedy="Leave out one of them",
        )
    if size is None:
        raise ConfigError(
            "There is no memory budget",
            why="On the CPU a probe may use what --gpu-mem allows, as if it were a card",
            remedy="Give --gpu-mem, such as 500MB",
        )
    budget_bytes = parse_bytes(size)
    if budget_bytes > card.capacity_bytes // 2:
        raise ConfigError(
            f"--gpu-mem {size} is more than half of this machine's memory",
            why=f"It has {format_bytes(card.capacity_bytes)}",
            remedy="Lower --gpu-mem",
        )
    return ChosenCard(gpu=card, source=CardSource.CPU, budget_bytes=budget_bytes)


def headroom_of(question: Question, budget_bytes: int | None) -> Headroom:
    """The room to leave, by the odds or the bytes that were asked for. Raises ConfigError.

    `budget_bytes` None: it is another for each card that is asked about.
    """
    if question.headroom is None:
        return USUAL_HEADROOM if question.odds is None else Headroom(odds=question.odds)
    if question.odds is not None:
        raise ConfigError(
            "--odds and --headroom do not go together",
            why="Each says how much room to leave",
            remedy="Give one of them",
        )
    if question.headroom.strip() == "0":
        return NO_HEADROOM
    spare_bytes = parse_bytes(question.headroom)
    if budget_bytes is not None and spare_bytes >= budget_bytes:
        raise ConfigError(
            f"--headroom {question.headroom} leaves nothing of the budget",
            why=f"That is {format_bytes(budget_bytes)}",
            remedy="Lower --headroom",
        )
    return Headroom(spare_bytes=spare_bytes)


def host_memory_of(question: Question) -> int | None:
    """Bytes of host memory that may be taken; 0: none may; None: any. Raises ConfigError."""
    if question.host_mem is None:
        return None
    return 0 if question.host_mem.strip() == "0" else parse_bytes(question.host_mem)


def agreed(option: str, value: int | None, of_base: int) -> int:
    """The base's value where the option was left out. ConfigError where the two differ."""
    if value is not None and value != of_base:
        raise ConfigError(
            f"{option} is {value}, and the base has {of_base}",
            why="Speeds are compared for the same work",
            remedy=f"Leave {option} out, or change the base",
        )
    return of_base


def check_shared_probes(backend: str, num_gpus: int, card: ChosenCard) -> None:
    """Check that probes of a run that several GPUs share have those GPUs here.

    Raises HardwareError where there are too few of one kind, ConfigError where the CPU's memory is too
    small to stand in for so many. A cluster counts its own.
    """
    if num_gpus == 1 or card.source is CardSource.CLUSTER:
        return
    if backend == "cuda" and (found := len(nvml.alike())) < num_gpus:
        raise HardwareError(
            f"Probes of a run on {num_gpus} GPUs need as many of one kind",
            why=f"This machine shows {found}",
            remedy="Leave --backend out, for a prediction",
        )
    if backend == "cpu" and num_gpus * card.budget_bytes > card.gpu.capacity_bytes // 2:
        raise ConfigError(
            f"{num_gpus} processes with {format_bytes(card.budget_bytes)} each need more than half of this "
            "machine's memory",
            why=f"It has {format_bytes(card.gpu.capacity_bytes)}",
            remedy="Lower --gpu-mem or --num-gpus",
        )


def shared_batch(effective_batch_size: int, num_gpus: int, task: str) -> int:
    """The effective batch size, where GPUs can share it evenly, and each has enough for the task's trainer.

    Raises ConfigError where they cannot.
    """
    row = TRAINERS[trainers_of(task)[0]]
    if effective_batch_size % num_gpus:
        # Completions come in whole groups besides.
        step = num_gpus * row.times_to_whole_groups(num_gpus)
        raise ConfigError(
            f"{num_gpus} GPUs cannot share an effective batch of {effective_batch_size}",
            why="Every GPU has as many samples",
            remedy=f"Give --effective-batch {-(-effective_batch_size // step) * step}",
        )
    if effective_batch_size // num_gpus < row.least_micro_batch:
        on_each = f" on each of {num_gpus} GPUs" if num_gpus > 1 else ""
        raise ConfigError(
            f"An effective batch of {effective_batch_size} is too small for {row.class_name}",
            why="It compares each sample with the others of its micro-batch, which needs "
            f"{row.least_micro_batch} at least{on_each}",
            remedy=f"Give --effective-batch {row.least_micro_batch * num_gpus}",
        )
    return effective_batch_size


def possible_length(source: ModelSource, length: int, *, is_given: bool) -> int:
    """Return the sequence length; where none was given no more than the model is made for.

    Raises ConfigError for a given one beyond the model's learned positions.
    """
    limit = source.max_sequence_length
    if not is_given:
        return min(length, limit or length, source.positions or length)
    if limit is not None and length > limit:
        raise ConfigError(
            f"A sequence of {length} tokens is too long for {source.short_name}",
            why=f"It has learned positions for {limit}",
            remedy=f"Give --seq-len {limit} or less",
        )
    return length


def length_of_texts(
    question: Question,
    source: ModelSource,
    pictures: Media | None,
    task: str,
    length: int,
    note: Callable[[str], None],
) -> int:
    """Return the length of what is said in a sound: of CTC no more tokens than the model looks at moments.

    Raises ConfigError for a given one that is longer.
    """
    if task != CTC or pictures is None or length <= pictures.num_moments:
        return length
    moments = max(pictures.num_moments, 1)
    if question.seq_len is not None or question.base is not None:
        raise ConfigError(
            f"A text of {length} tokens is too long for {pictures.seconds:g} s of sound",
            why=f"{source.short_name} makes {moments} moments of it, and CTC gives each of them one token at "
            "most",
            remedy=f"Give --seq-len {moments} or less, or longer sounds",
        )
    if question.dataset is None:
        note(
            f"texts are taken to have {moments} tokens, one for each moment of sound: --seq-len says how "
            "many the longest has."
        )
    return moments


def for_task(source: ModelSource, task: str) -> ModelSource:
    """Return the model with what its files say for the task.

    Raises ConfigError where the task is for models of other types, where it learns nothing by foretelling
    words, or would lose a part.
    """
    _check_type(source, task)
    if task in EMBEDDERS:
        return with_modules_behind(source)
    if model_task(task) != CAUSAL:
        return source
    if source.reads_both_ways:
        why = "It reads both ways: each place sees the next word, which it should foretell"
    elif source.has_encoder_and_decoder:
        why = "Its encoder would be left out, and its decoder alone trained"
    else:
        return source
    raise ConfigError(
        f"{source.short_name} cannot be trained for the task {task}",
        why=why,
        remedy=f"Name a model that writes, or ask for --task {source.task}",
    )


def _check_type(source: ModelSource, task: str) -> None:
    """Raise ConfigError where a model's type is none of a task's, with the tasks that it has.

    Of models that see, a worker says which are trained on pictures.
    """
    row, kind = row_of(task), source.config["model_type"]
    fits = tasks_of(kind)
    if row.families and kind not in row.families:
        why = f"Here models of the type {', '.join(row.families)} are, and it is of the type {kind}"
    elif fits is not None and row.has_loss and row.name not in (*fits, PICTURES):
        why = f"Transformers has no {row.model_class} of the type {kind}"
    else:
        return
    own = [source.task, *(each for each in fits or () if each not in (source.task, CAUSAL))]
    remedy = f"Give --task {' or '.join([*filter(None, [', '.join(own[:-1])]), own[-1]])}"
    if fits == ():
        remedy = "Name another model: none of the tasks here is for its type"
    elif PICTURES in (fits or ()):
        remedy = (
            f"Give --task {PICTURES} with a --dataset that has pictures, or say which ones each sample has "
            "(--images, --image-size)"
        )
    raise ConfigError(
        f"{source.short_name} cannot be trained for the task {task}", why=why, remedy=remedy
    )


def has_lengths(task: str, length: int | None) -> bool:
    """Return whether samples of a task are so many tokens long. Raises ConfigError where one has none."""
    if row_of(task).has_lengths:
        return True
    if length is not None:
        why = "A sample is a picture: --image-size says how large it is"
        if row_of(task).reads == "waves":
            why = "A sample is a sound: --audio-seconds says how long it is"
        raise ConfigError(f"--seq-len does not go with --task {task}", why=why)
    return False


def check_length(task: str, length: int) -> None:
    """Raise ConfigError where a sample is too short to learn from (its loss would be NaN)."""
    if task == CAUSAL and length < 2:
        raise ConfigError(
            "A sequence of one token trains nothing",
            why="A language model learns to predict the next token, and there is none",
            remedy="Give --seq-len 2 or more",
        )


def longest_batch(
    lengths: Lengths, length: int, *, packs: bool, note: Callable[[str], None]
) -> int:
    """The sequence length of the worst batch; says so where it is shorter than what was asked for."""
    if packs or lengths.longest == length:
        return length
    note(f"no sample has more than {lengths.longest} tokens: that is the sequence length.")
    return lengths.longest


def read_yaml(path: Path) -> object:
    """Read the YAML file that an option names. Raises ConfigError."""
    try:
        return parse_yaml(files.read_text(path, MAX_FILE_BYTES), takes_merges=True)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML", why=why_not_yaml(error)) from error


def generation(
    source: ModelSource, config: TrainConfig, *, batch_size: int | None, context: int | None
) -> KvCache:
    """Return the cache that generation keeps, in the dtype that the configuration computes in.

    By default for as many samples as a micro-batch holds.
    """
    return kv_cache(
        source.text_config,
        batch_size=batch_size or config.micro_batch_size,
        context=possible_length(source, context or config.sequence_length, is_given=True),
        dtype=PRECISIONS[config.precision].compute_dtype,
    )


def methods_for(source: ModelSource, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the methods that can train the checkpoint. Raises ConfigError where none can."""
    checkpoint = source.checkpoint
    if checkpoint is None:
        return methods
    is_packed = checkpoint.quantization != "none"
    kept = tuple(
        method
        for method in methods
        if (method in KNOBS["quantization"].methods if is_packed else method != "qlora")
    )
    if not kept:
        stored = f"stored in {checkpoint.quantization}, and an adapter over that is method qlora"
        unpacked = (
            f"quantised already, and {checkpoint.unpacked_by} can only unpack it into 16 bits"
        )
        raise ConfigError(
            f"{source.short_name} cannot be trained by {' or '.join(methods)}",
            why=f"Its checkpoint is {stored if is_packed else unpacked}",
            remedy=f"Give --method {'qlora' if is_packed else 'lora'}, or name the model that it was made "
            "from",
        )
    return kept


def check_rules(
    config: TrainConfig,
    workload: Workload,
    card: Gpu,
    source: ModelSource,
    *,
    what: str,
    is_estimate: bool = False,
) -> None:
    """Raise ConfigError with the reason of each rule of the space that is broken.

    `is_estimate`: of those of what is only priced.
    """
    context = Context(
        effective_batch_size=workload.effective_batch_size,
        num_layers=source.num_layers,
        compute_capability=card.compute_capability,
        max_sequence_length=source.max_sequence_length,
        weight_decay=workload.decays,
        head_size=source.head_size,
        task=workload.task,
        checkpoint=source.checkpoint,
        served=served_by_vllm(source, card),
        is_estimate=is_estimate,
    )
    rules = broken_rules(config, context)
    if rules:
        reasons = "; ".join(f"{rule.reason} ({rule.name})" for rule in rules)
        raise ConfigError(f"{what} cannot work: {reasons}")


@_in_this_machine
def card_here(name: str | None, size: str | None) -> ChosenCard:
    """Choose the card of this machine for probes on CUDA, under a smaller budget where one was typed.

    What others hold of it is no part of a budget. Raises ConfigError, HardwareError.
    """
    here = gpus.detect()
    if not here:
        reason = nvml.why_no_card() or "NVIDIA's driver reports none on this machine"
        raise HardwareError(
            "--backend cuda needs a CUDA GPU",
            why=reason[0].upper() + reason[1:],
            remedy="Leave --backend out, for a prediction",
        )
    card = here[0]  # the one that a probe runs on
    budget_bytes = card.capacity_bytes if size is None else parse_bytes(size)
    if budget_bytes > card.capacity_bytes:
        raise HardwareError(
            f"--gpu-mem {size} is more than the card has",
            why=f"This one has {format_bytes(card.capacity_bytes)}",
            remedy="Lower --gpu-mem",
        )
    if name is not None and gpus.find_gpu(name).name != card.name:
        raise ConfigError(
            f"--gpu {name} is not the card of this machine",
            why=f"It is a {card.name}",
            remedy="Leave --gpu out; --gpu-mem emulates less memory",
        )
    taken = nvml.taken_of(budget_bytes)
    card, own = with_own_rates(card)
    found = ChosenCard(gpu=card, source=CardSource.FOUND, budget_bytes=budget_bytes, own_rates=own)
    if taken is None:
        return found
    free_bytes = taken.free_bytes // FREE_STEP_BYTES * FREE_STEP_BYTES
    free = f"{format_bytes(taken.free_bytes)} of its {format_bytes(card.capacity_bytes)} are free"
    if size is None and free_bytes:
        note = f"{free}, so the budget is {format_bytes(free_bytes)}: {taken}"
        return dataclasses.replace(found, budget_bytes=free_bytes, note=note)
    raise HardwareError(
        "The card has too little free memory" if size is None else f"--gpu-mem {size} is not free",
        why=f"{free}: {taken}",
        remedy="End what holds it, or lower --gpu-mem; --backend predict needs no free card",
    )


def card_here_or_planned(name: str | None, size: str | None) -> ChosenCard:
    """Choose the card that probes run on where it has as much memory, else as `choose_card` does."""
    here = gpus.detect()
    if name is None and here and (size is None or parse_bytes(size) <= here[0].capacity_bytes):
        return card_here(None, size)
    chosen = choose_card(name, size)
    if not chosen.is_here:
        return chosen
    return dataclasses.replace(
        chosen,
        source=CardSource.PLANNED,
        note="it is here, and CUDA_VISIBLE_DEVICES does not put it first",
    )


FREE_STEP_BYTES = 256 * MIB
"""Step to which free memory is rounded down, so that the same command finds its study again."""

CHOOSERS = {"auto": card_here_or_planned, "cpu": cpu_as_card, "cuda": card_here}
"""Ways to choose a card, by backend; choose_card for the others."""
