"""An answer's figures in words, one line each, as the terminal draws them."""

from __future__ import annotations

import math
import operator

from autotune.catalogue import gpus
from autotune.catalogue.tasks import CAUSAL
from autotune.common.units import GIB, counted, format_bytes, format_count, format_seconds, unit_for
from autotune.common.user_text import printable
from autotune.records.answer import (
    FAR_FASTER,
    MORE_MEMORY_BYTES,
    TRAINER_DEFAULTS,
    Answer,
    Change,
)
from autotune.records.estimate import Estimate, Timed
from autotune.records.measurement import NOISE, Measurement
from autotune.space import learning_rates, requirements
from autotune.space.checkpoint_plans import plan_offloads
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig, Workload
from autotune.space.headroom import COMPILED_SHARE, DEFAULT_ODDS, VARIED_SHARE
from autotune.space.knobs import KNOBS, METHOD_WORDS
from autotune.space.lengths import Lengths, vary
from autotune.space.media import Media
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS
from autotune.space.tradeoffs import loses_small_updates, trains_bfloat16
from autotune.space.trainers import BY_TASK, TRAINERS, row_of
from autotune.space.words import describe, difference
from autotune.speed.origin import RatesFrom
from autotune.speed.sureness import within

_LIMITS = "overlapping streams, data loading, evaluation, logging"
"""Parts of training that no prediction contains; autotune.predict.estimator and autotune.speed.roofline name
the finer ones."""

MAX_NAME_CHARS = 120
GLUE = "\N{NO-BREAK SPACE}"
"""The space where a line of ours must not break; printed as a plain one."""


def model_name(name: str) -> str:
    """The model's name as typed, printable, its end cut off where it is endless."""
    return printable(name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}...")


def model_size(estimate: Estimate) -> str:
    """The model's size, such as `1.54 B parameters`; an adapter's are not counted."""
    count = estimate.parameters
    of_adapter = 0 if estimate.config.method == "full" else count.trainable
    return f"{format_count(count.total - of_adapter)} parameters"


def exact_size(size_bytes: int) -> str:
    """The size as it may have been typed and as everything else is printed: `12 GB = 11.18 GiB`."""
    name, unit_bytes = unit_for(size_bytes)
    size = f"{size_bytes / unit_bytes:.2f} {name}"
    return f"{typed} = {size}" if (typed := typed_size(size_bytes)) else size


def short_size(size_bytes: int) -> str:
    """The size as `12 GB` where it was typed so, else as `11.18 GiB`."""
    return typed_size(size_bytes) or format_bytes(size_bytes)


def typed_size(size_bytes: int) -> str:
    """The size in whole GB, or in MB below one GB; empty where it is whole in neither."""
    name, unit_bytes = ("GB", 10**9) if size_bytes >= 10**9 else ("MB", 10**6)
    return "" if size_bytes % unit_bytes else f"{size_bytes // unit_bytes} {name}"


def limits(config: TrainConfig | None, seen: Media | None = None) -> str:
    """Return what a prediction leaves out; of a configuration, and of what is seen or heard, if any."""
    if config is not None and config.max_completion_length is not None:
        rewards = "rewards, " if TRAINERS[config.trainer].is_rewarded else ""
        started = "the start of vLLM, " if config.writes_with_vllm else ""
        return f"{_LIMITS}, {rewards}{started}completions that end early"
    if config is not None and config.precompute_ref_log_probs:
        return f"{_LIMITS}, the reference's pass over all samples before training"
    if config is not None and plan_offloads(config.checkpoint_plan):
        return f"{_LIMITS}, what copies to host memory slow down beside them"
    if seen is not None and not seen.is_in_text:
        return f"{_LIMITS}, what cuDNN's convolutions work in, and their time by shape"
    return _LIMITS


def speed(estimate: Estimate) -> str:
    if estimate.tokens_per_second is None:
        return "unknown: the card's rates are not known"
    return f"{estimate.tokens_per_second:,.0f} {estimate.config.speed_unit}{samples(estimate)}"


def samples(timed: Timed) -> str:
    """The speed in samples of full length, to stand behind that in tokens; empty for Trainer's tasks."""
    count, row = timed.samples_per_second, TRAINERS[timed.config.trainer]
    return f", {_rate(count)} {row.sample}s/s" if row.task and count is not None else ""


def _rate(per_second: float) -> str:
    """A rate with three digits at least: `5.68`, `5,684`."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def heard(answer: Answer) -> str:
    """The speed in samples, each of as much sound as the model reads; empty where it reads none."""
    if not row_of(answer.workload.task).writes_down:
        return ""
    timed: Timed = answer.best if answer.measured is None else answer.measured.final
    count = timed.samples_per_second
    speed = "an unknown number of" if count is None else _rate(count)
    return f"{speed} samples/s, each of as much sound, however long its text is"


def batch(config: TrainConfig) -> str:
    """The samples of a step and their tokens: `32 x 1,024`."""
    if config.sequence_length == 1:
        return counted(config.effective_batch_size, "sample")
    if config.rows_per_sample == 1:
        return f"{config.effective_batch_size:,} x {config.sequence_length:,}"
    pairs = counted(config.effective_batch_size, TRAINERS[config.trainer].sample)
    return f"{pairs} of {config.rows_per_sample} x {config.sequence_length:,}"


def of_tokens(config: TrainConfig) -> str:
    """The samples of a step, and their tokens where they have some: `32 x 1,024 tokens`, `32 samples`."""
    return batch(config) if config.sequence_length == 1 else f"{batch(config)} tokens"


def speed_range(estimate: Estimate) -> str:
    """The predicted speed with the range that holds it with 80 %."""
    tokens, spread = estimate.tokens_per_second, estimate.step_spread
    if tokens is None or spread is None:
        return speed(estimate)
    low, high = within(tokens, estimate.slow_spread or spread, spread)
    return f"{speed(estimate)} (with 80 % {_rounded(low)} to {_rounded(high)}){_after_compiling(estimate)}"


def _after_compiling(estimate: Estimate) -> str:
    """How long the optimizer compiles itself; empty where it does not, or the whole step is compiled."""
    if estimate.compile_seconds is None or estimate.config.torch_compile != "none":
        return ""
    low, high = estimate.compile_seconds
    return f" once its optimizer has compiled itself for {low:.0f} to {high:.0f} s"


_EVIDENCE = {
    RatesFrom.THIS_CARD: "measured on this card",
    RatesFrom.CARDS_LIKE_IT: "on cards like it",
    RatesFrom.DATASHEET: "from its datasheet",
}
_NEARLY_ALL = 0.9
_NAMED = 0.01


def rates(estimate: Estimate) -> str:
    """The evidence that the predicted time rests on, by kind of work; empty where it is unknown."""
    said, shares = [], estimate.time_shares
    # A cause is named where most of it is: the largest shares come first.
    largest = {each.cause: each for each in reversed(shares) if each.share >= _NAMED}
    for evidence, whole in _EVIDENCE.items():
        total = sum(each.share for each in shares if each.rates_from is evidence)
        if total >= _NEARLY_ALL:
            return whole
        causes = [cause for cause, each in largest.items() if each.rates_from is evidence]
        if causes:
            said.append(f"{evidence}: {', '.join(reversed(causes))} ({100 * total:.0f} %)")
    return "; ".join(said)


def _rounded(tokens: float) -> str:
    """The figure to two digits: a range has no more."""
    return f"{float(f'{tokens:.2g}'):,.0f}"


def predicted(estimate: Estimate) -> str:
    """The predicted figures, to stand beside measured ones."""
    whose = "predicted without torch.compile" if estimate.is_bound else "predicted"
    return f"{whose} {speed(estimate)}, {format_bytes(estimate.peak_device_bytes)}"


def predicted_compilation(answer: Answer) -> str:
    """The predicted worth of torch.compile, and when it pays; empty where none was predicted."""
    found = answer.compilation
    if found is None:
        return ""
    assert found.compiled.compile_seconds is not None
    pays_after = found.pays_after_steps
    verdict = "it never pays for itself"
    if pays_after is not None:
        verdict = f"it pays for itself after {pays_after[0]:,} to {pays_after[1]:,} steps"
    low, high = found.compiled.compile_seconds
    mode = KNOBS["torch_compile"].words(found.compiled.config.torch_compile)
    return (
        f"{mode}, predicted: {speed_range(found.compiled)} at best, {speed(found.eager)} without it; it "
        f"compiles for {low:.0f} to {high:.0f} s: {verdict}"
    )


def data(workload: Workload, batching: str = "") -> str:
    """The format of the dataset, and the lengths of its samples, which `batching` may not cut off."""
    lengths, dataset = workload.lengths, workload.dataset
    assert lengths is not None
    is_partial = dataset is not None and dataset.loss_on == "answers" and workload.task == CAUSAL
    counted_ = counted(lengths.num_samples, "sample")
    if (row := BY_TASK.get(workload.task)) is not None:
        number = lengths.num_samples // row.rows_per_sample
        with_prompt = ", each answer with its prompt" if row.is_trl else " of texts"
        counted_ = f"{counted(number, row.sample)}{with_prompt}"
        if row.generates is not None:
            counted_ = f"{counted(number, 'prompt')}, each with a completion as long as may be"
    if workload.sequence_length == 1:
        return f"{f'{dataset.format}, ' if dataset else ''}{counted_}"
    return (
        f"{f'{dataset.format}, ' if dataset else ''}{counted_}"
        f"{', of which the answers are learnt' if is_partial else ''}; "
        f"{format_count(lengths.num_tokens)} tokens"
        f"{_kept(lengths, batching)}: {lengths.num_kept_tokens / lengths.num_samples:,.0f} on average, "
        f"{lengths.percentiles[50]:,} in the middle, at most {lengths.longest:,}"
    )


def pictures(seen: Media) -> str:
    """The pictures of a sample, and how many of its tokens stand for them."""
    if seen.seconds:
        return f"a sample is {seen.seconds:g} s of sound"
    several = "pictures" if seen.num_images > 1 else "picture"
    if not seen.is_in_text:
        return f"a sample is a picture of {seen.size}"
    size = f"up to {seen.size}" if seen.sizes else seen.size
    return (
        f"{seen.num_images} {several} of {size} in each sample, which {seen.num_tokens:,} of its "
        "tokens stand for"
    )


def _kept(lengths: Lengths, batching: str) -> str:
    """The tokens that are left of samples that are cut off; empty where none is."""
    if lengths.num_kept_tokens == lengths.num_tokens:
        return ""
    which = ", which packing does not" if batching == "packed" else ""
    return f", {format_count(lengths.num_kept_tokens)} after cutting off{which}"


def carried(workload: Workload) -> str:
    """The names that the user has set and no setting of ours decides."""
    return f"{', '.join(map(printable, workload.extra))}: unchanged from your base"


def epoch(answer: Answer) -> str:
    """Predicted time for all of the dataset, and how much of it goes into padding.

    The last step of an epoch has the micro-batches that are left (transformers 5.23 Trainer._run_epoch).
    """
    lengths, best = answer.workload.lengths, answer.best
    assert lengths is not None
    assert best.micro_step_seconds is not None
    assert best.optimizer_step_seconds is not None
    num_tokens = lengths.tokens_per_epoch(best.config.batching)
    length = best.config.sequence_length
    if not lengths.fill_a_block(best.config.batching, length):
        return (
            f"none, and train.py refuses to train: the dataset has {counted(num_tokens, 'token')}, and a "
            f"packed block {length:,}. Give --seq-len {num_tokens} at most, or a --space with "
            "batching: [padded]."
        )
    accumulation = best.config.gradient_accumulation_steps
    useful_tokens = best.useful_share * best.config.tokens_per_step / accumulation
    num_micro_batches = math.ceil(num_tokens / useful_tokens)
    num_steps = math.ceil(num_micro_batches / accumulation)
    seconds = num_micro_batches * best.micro_step_seconds + num_steps * best.optimizer_step_seconds
    part = ""
    if num_micro_batches < accumulation:
        part = f", which fill {num_micro_batches} of a step's {accumulation} micro-batches"
    padding = 100 * (1 - answer.workload.filling(best.config).useful_share)
    return f"{format_seconds(seconds)} for all samples{part}; {padding:.0f} % of a batch is padding"


def step(estimate: Estimate) -> str:
    """Length of a step and what bounds it."""
    config = estimate.config
    if estimate.step_seconds is None:
        return "unknown"
    share = "" if estimate.mfu is None else f" ({100 * estimate.mfu:.0f} % of the card's peak)"
    return (
        f"{format_seconds(estimate.step_seconds)} at {of_tokens(config)}, bound by "
        f"{estimate.bound}{share}"
    )


def against_baseline(answer: Answer) -> str:
    """The speed-up over the base, or that there is none to speak of."""
    baseline = answer.baseline
    if baseline is None:
        said = describe_base(answer.base)
        if answer.base_refused:
            return f"{answer.base_name} ({said}) cannot be traced: {answer.base_refused}"
        if lacking_bytes := answer.base_lacks_on_host_bytes:
            lack = f"lack {format_bytes(lacking_bytes)} of host memory (--host-mem)"
            return f"{answer.base_name} ({said}, micro-batch {answer.base.micro_batch_size}) {lack}"
        if answer.base_name == TRAINER_DEFAULTS:
            return f"{answer.base_name} ({said}) do not fit at any micro-batch"
        return f"{answer.base_name} ({said}, micro-batch {answer.base.micro_batch_size}) do not fit"
    if baseline.config == answer.best.config:
        return the_base_itself(answer.base_name)
    assert answer.speedup is not None
    said = f"{answer.speedup:.2f} x {baseline_speed(answer, baseline)}"
    if answer.speedup < 1 and not answer.is_base_offered:
        return f"{said}, which this --space does not offer"
    return said


def the_base_itself(base_name: str) -> str:
    """An answer that is the base."""
    if base_name == TRAINER_DEFAULTS:
        return f"{base_name}, at the largest micro-batch that fits"
    return f"{base_name}, unchanged"


def baseline_speed(answer: Answer, baseline: Estimate) -> str:
    """The predicted speed of the base, and what the base is."""
    assert baseline.tokens_per_second is not None
    return (
        f"the {baseline.tokens_per_second:,.0f} of {answer.base_name} "
        f"({describe_base(baseline.config)}, micro-batch {baseline.config.micro_batch_size})"
    )


def describe_base(config: TrainConfig) -> str:
    return f"{METHOD_WORDS[config.method]}, {config.precision}, {config.optimizer}"


def memory_parts(estimate: Estimate) -> list[tuple[str, int]]:
    """The parts of memory that are alive at the peak, in bytes; they add up to the peak on the device."""
    parts = estimate.breakdown
    paged_bytes = estimate.paged_in_bytes + estimate.staying_bytes
    parted = [
        ("weights", parts.parameters_bytes),
        ("gradients", parts.gradients_bytes),
        ("optimizer", parts.optimizer_state_bytes),
        ("activations", parts.activations_bytes),
        ("logits", parts.logits_bytes),
        (
            "loading" if parts.is_of_loading else "other",
            parts.temporaries_bytes + parts.workspace_bytes + parts.rounding_bytes,
        ),
        ("cached", estimate.peak_reserved_bytes - estimate.peak_allocated_bytes),
        (
            "CUDA",
            estimate.nontorch_bytes - paged_bytes - estimate.vllm_bytes,
        ),
    ]
    if estimate.vllm_bytes:
        parted.append(("vLLM", estimate.vllm_bytes))
    if paged_bytes:
        parted.append(("paged state", paged_bytes))
    return parted


def memory(estimate: Estimate, budget_bytes: int) -> str:
    """The bytes that have to be on the device, of the budget, and the parts of the peak, in one line."""
    unit, unit_bytes = unit_for(budget_bytes)
    parted = [
        f"{name} {size_bytes / unit_bytes:,.1f}".replace(" ", GLUE)
        for name, size_bytes in memory_parts(estimate)
    ]
    listed = f"{GLUE}| ".join(parted)
    used, of = estimate.resident_bytes / unit_bytes, budget_bytes / unit_bytes
    return f"{used:,.1f} of {of:,.1f} {unit}  {listed}"


def budget(answer: Answer) -> str:
    """The budget, and what a predicted answer leaves of it."""
    budget_bytes = answer.workload.memory_budget_bytes
    size = exact_size(budget_bytes)
    return size if answer.measured else f"{size}; the answer {room(answer.best, budget_bytes)}"


def room(estimate: Estimate, budget_bytes: int, host_memory_bytes: int | None = None) -> str:
    """Whether the estimate fits, with which odds, and what is spare beside what has to be on the device."""
    spare_bytes = budget_bytes - estimate.resident_bytes
    if lacking_bytes := estimate.lacks_on_host(host_memory_bytes):
        on_card = f" and on the card by {format_bytes(-spare_bytes)}" if spare_bytes < 0 else ""
        return f"does not fit, in the host's memory by {format_bytes(lacking_bytes)}{on_card}"
    if spare_bytes < 0:
        return f"does not fit, by {format_bytes(-spare_bytes)}"
    odds = estimate.fits_with(budget_bytes)
    tightly = "" if odds > DEFAULT_ODDS - _SAME_ODDS else " tightly"
    spare = format_bytes(spare_bytes) if spare_bytes else "nothing"
    why = ""
    if tightly and vary(estimate.config.batching):
        why = f"; batches of varied lengths may need {VARIED_SHARE:.0%} more".replace("%", " %")
    paged = ""
    if paged_bytes := estimate.paged_in_bytes:
        paged = f", which {format_bytes(paged_bytes)} of paged state may take meanwhile"
    return f"fits{tightly} with {_odds(odds)}, {spare} to spare{paged}{why}"


_SAME_ODDS = 1e-6


def _odds(odds: float) -> str:
    """Odds as per cent, rounded down."""
    if not odds:
        return "less than 50 %"
    decimals = 1 if odds > DEFAULT_ODDS - _SAME_ODDS else 0
    scale = 10**decimals
    return f"{math.floor(100 * scale * (odds + _SAME_ODDS)) / scale:g} %"


def of_each_gpu(estimate: Estimate) -> list[tuple[str, str]]:
    """Rows on what several GPUs share out, gather and send, or one keeps that offloads; else none."""
    share = estimate.per_gpu
    if share is None:
        return []
    parts = [
        f"weights {format_bytes(share.parameters_bytes)}",
        f"gradients {format_bytes(share.gradients_bytes)}",
        f"optimizer {format_bytes(share.optimizer_state_bytes)}",
    ]
    others = (
        ("gathered at most", share.gathered_bytes),
        ("buffers", share.buffers_bytes),
        ("host memory", share.host_bytes),
    )
    parts += [f"{name} {format_bytes(size_bytes)}" for name, size_bytes in others if size_bytes]
    held = ", ".join(parts)
    if share.num_gpus == 1:
        return [("keeps", held)]
    rows = [("per GPU", f"all figures of memory are of each GPU. It keeps {held}")]
    if share.layers:
        counts = " + ".join(map(str, share.layers))
        idle = f"{100 * (1 - 1 / share.num_gpus):.0f} %"
        how = f"while one GPU works the others wait: {idle} of the time idle"
        name = "in turn"
        if PARALLELISMS[share.parallelism].schedules:
            num_micro_batches = estimate.config.gradient_accumulation_steps
            waits = (share.num_gpus - 1) / (num_micro_batches + share.num_gpus - 1)
            how = (
                f"1F1B of {num_micro_batches} micro-batches, {100 * waits:.0f} % of the time idle; "
            )
            how += "no installed trainer runs it, so nothing is exported"
            name = "pipeline"
        rows = [
            ("per GPU", f"all figures of memory are of the fullest GPU. It keeps {held}"),
            (name, f"{counts} layers; {how}"),
        ]
    seconds, best = share.communication_seconds, estimate.overlapped_step_seconds
    if seconds is not None and best is not None:
        sent = f"{format_bytes(share.sent_bytes_per_step)} a step: {format_seconds(seconds)} of the step"
        if best == estimate.step_seconds:
            sent += ", in which kernels wait for all of it"
        else:
            sent += f", which takes {format_seconds(best)} where all of it overlaps"
        if share.hidden_seconds:
            sent += f"; {format_seconds(share.hidden_seconds)} more behind the backward pass"
        rows.append(("sends", sent))
    return rows


def why(answer: Answer) -> str:
    """The reason why nothing is faster, and what changed settings are good for, the largest lever first."""
    best, more = answer.best, answer.more_memory
    more_gb = f"{MORE_MEMORY_BYTES / 10**9:.0f} GB more"
    if more is None:
        sentences = [
            f"Bound by {best.bound}, not by the amount of memory: {more_gb} would make nothing faster."
        ]
    else:
        bought = f"allow {difference(more.estimate.config, best.config)}"
        if more.estimate.config == best.config:
            bought = "hold more of the optimizer's paged state"
        sentences = [
            f"The amount of memory limits the speed: {more_gb} would {bought}, "
            f"{gain(more.estimate, best)}."
        ]
    levers = [(_lever(change, best, answer.workload), change) for change in answer.changes]
    levers.sort(key=operator.itemgetter(0), reverse=True)
    telling = [pair for pair in levers if pair[0] >= NOISE] or levers[:1]
    return " ".join([*sentences, *(changed(c, best, answer.workload) for _, c in telling)])


def _lever(change: Change, best: Estimate, workload: Workload) -> float:
    """Share of the speed that is lost, or of the budget that is lacking, without a setting of the answer."""
    budget_bytes = workload.memory_budget_bytes
    if lacking_bytes := change.estimate.lacks_on_host(workload.host_memory_bytes):
        return lacking_bytes / change.estimate.all_host_bytes
    if not change.leaves_room:
        return (change.estimate.resident_bytes - budget_bytes) / budget_bytes
    assert change.estimate.tokens_per_second is not None
    assert best.tokens_per_second is not None
    return 1 - change.estimate.tokens_per_second / best.tokens_per_second


def _method(name: str) -> str:
    """Return a training method in words, as a sentence has it."""
    return METHOD_WORDS[name].replace("full", "full fine-tuning")


def changed(change: Change, best: Estimate, workload: Workload) -> str:
    """The effect of putting one setting of the answer back."""
    if change.setting == "method":
        words = _method(str(change.value))
    else:
        words = KNOBS[change.setting].words(change.value)
    return f"With {words} instead: {_outcome(change, best, workload)}."


def _outcome(change: Change, best: Estimate, workload: Workload) -> str:
    """The speed against the answer's, or what is lacking."""
    if change.leaves_room:
        return gain(change.estimate, best)
    budget_bytes = workload.memory_budget_bytes
    if lacking_bytes := change.estimate.lacks_on_host(workload.host_memory_bytes):
        return f"{format_bytes(lacking_bytes)} too much in host memory"
    excess_bytes = change.estimate.resident_bytes - budget_bytes
    if excess_bytes <= 0:
        odds = _odds(change.estimate.fits_with(budget_bytes))
        return f"too little room, it fits with {odds}"
    return f"{format_bytes(excess_bytes)} too much"


_STEPS_OF_THE_RATE = ("adamw", "lion")
"""Families of optimizers that move a weight by the learning rate, more or less, whatever its gradient is."""


def rounding(answer: Answer) -> str:
    """Updates that bfloat16 weights lose, and the cost of keeping them; empty for weights of 32 bits."""
    best, safer = answer.best, answer.safer
    if not trains_bfloat16(best.config):
        return ""
    if not loses_small_updates(best.config):
        return f"bfloat16 weights: {best.config.optimizer} keeps the updates that plain rounding would lose."
    said = "bfloat16 weights: an update below about 1/256 of its weight is lost to rounding"
    rate, usual = answer.learning_rate, learning_rates.BY_METHOD[best.config.method].value
    if rate < usual and OPTIMIZERS[best.config.optimizer].family in _STEPS_OF_THE_RATE:
        said += (
            f", which at a rate of {rate:g} is that of every weight above about {256 * rate:.2g}"
        )
    said += "."
    if safer is None:
        return said
    what = (
        describe(safer.estimate.config)
        if safer.leaves_room
        else KNOBS[safer.setting].words(safer.value)
    )
    lost = _outcome(safer, best, answer.workload)
    return f"{said} Safe: {what} ({lost}{'' if safer.leaves_room else ' at least'})."


def quantized_room(answer: Answer) -> str:
    """The evidence behind the odds of 4-bit weights; empty with others, or if measured (studies/headroom)."""
    best = answer.best
    if answer.measured is not None or QUANTIZATIONS[best.config.quantization].bits != 4:
        return ""
    return (
        "4-bit weights: the odds rest on 43 steps measured on a T4, which reserved up to 6 % more than "
        "predicted. Of 20 others, loaded by an older Transformers (5.0), 3 took 11 to 17 % more."
    )


def gain(estimate: Estimate | Measurement, best: Estimate | Measurement) -> str:
    """The speed against the answer's, such as `+14 %`."""
    assert estimate.tokens_per_second is not None
    assert best.tokens_per_second is not None
    ratio = estimate.tokens_per_second / best.tokens_per_second - 1
    return "as fast" if abs(ratio) < 0.005 else f"{100 * ratio:+.0f} %"


def bounds(estimate: Estimate) -> list[str]:
    """Notes on the settings that are not predicted: what that means for the figures."""
    settings = requirements.unpredicted(estimate.config)
    if estimate.is_bound and not settings:  # its step could not be traced compiled
        settings = (KNOBS["torch_compile"].words(estimate.config.torch_compile),)
    return [
        f"{setting} is not predicted: the figures are those without it, a bound to be measured."
        for setting in settings
    ]


def notes(answer: Answer) -> list[str]:
    """Everything that the figures of an answer need to be read with."""
    best = answer.best
    paged = bool(best.state.optimizer_state_managed_bytes)
    keeps_room = best.peak_device_bytes < answer.workload.memory_budget_bytes
    said = (
        paging(best, keeps_room=keeps_room, was_run=answer.measured is not None) if paged else "",
        screen(answer),
        fewer_gpus(answer),
        over_pcie(best) if answer.measured is None else "",
        far_faster(answer),
        *bounds(best),
        quantized_room(answer),
        compiled_room(answer),
        rounding(answer),
        coarse_batch(answer),
        compared_apart(best.config),
        experts(answer),
        unfused_casts(best.config),
        best.unquantized_note,
    )
    return list(filter(None, said))


SANE_HOST_BYTES = 32 * GIB
"""Host memory for each card that most machines have. [judgement]"""


def paging(estimate: Estimate, *, keeps_room: bool = False, was_run: bool = False) -> str:
    """The optimizer state that may leave the card, and the host memory that it takes then.

    `keeps_room`: whether room is kept on the card, which what is paged does not fill. `was_run`: whether this
    machine has run it, and so can page.
    """
    managed_bytes = estimate.state.optimizer_state_managed_bytes
    if estimate.staying_bytes:
        held = f"{format_bytes(managed_bytes)} of optimizer state would be paged"
        return f"{held}: in WSL 2 it stays on the card."
    host_bytes = managed_bytes - estimate.paged_in_bytes
    if not host_bytes:
        room = "and all of it finds room on the card"
        return f"{format_bytes(managed_bytes)} of optimizer state may be paged, {room}."
    where = "beside what is kept to spare" if keeps_room else "on the card"
    waits = f"{format_bytes(host_bytes)} find no room {where} and wait in host memory"
    return (
        f"{format_bytes(managed_bytes)} of optimizer state is paged: {waits}; "
        "the transfers are in the step time."
        + (
            ""
            if was_run
            else " In WSL 2 none of it can leave the card: ask there, or with --host-mem 0."
        )
    )


_SCREEN_BYTES = GIB
"""Memory of a card that a desktop with its programs may hold. [judgement] Some hold half, some twice that."""


def screen(answer: Answer) -> str:
    """A note where a screen on the card may take what a prediction has to spare; else empty.

    Not where the budget or the headroom that was asked for leaves room for one.
    """
    workload, best = answer.workload, answer.best
    known = gpus.of_name(answer.gpu)
    if answer.measured is not None or known is None or not {"RTX", "TITAN"} & {*known.name.split()}:
        return ""
    spare_bytes = max(workload.memory_budget_bytes - best.resident_bytes, 0)
    is_asked_for = workload.headroom.spare_bytes is not None
    has_room = known.capacity_bytes - workload.memory_budget_bytes + spare_bytes >= _SCREEN_BYTES
    if is_asked_for or has_room:
        return ""
    return (
        f"A screen on this card often takes more than the {format_bytes(spare_bytes)} to spare: with one, "
        "give --gpu-mem what nvidia-smi shows as free."
    )


def fewer_gpus(answer: Answer) -> str:
    """A note where fewer of the GPUs are faster than all; else empty."""
    best, fewer = answer.best, answer.fewer_gpus
    if fewer is None:
        return ""
    count = fewer.config.num_gpus
    are = "One of these GPUs is" if count == 1 else f"{count} of these GPUs are"
    return (
        f"{are} faster than all {best.config.num_gpus}, which send for most of a step: {speed(fewer)} in "
        f"place of {speed(best)}. Give --num-gpus {count}, or a larger --effective-batch: a step sends as "
        "much then."
    )


_MUCH_SENDING = 0.25
"""Share of a step that is sent from which the rate that it is sent at decides. [judgement]"""


def over_pcie(estimate: Estimate) -> str:
    """A note where the time rests on what machines usually reach over PCIe; else empty.

    Source of what they reach: studies/kernels/LINKS.md.
    """
    share, seconds, known = estimate.per_gpu, estimate.step_seconds, gpus.of_name(estimate.gpu)
    if share is None or not seconds or known is None:
        return ""
    sends = (share.communication_seconds or 0.0) / seconds >= _MUCH_SENDING
    rate = share.link_bytes_per_second
    if not sends or rate is None or share.link_is_measured or known.interconnect != "PCIe":
        return ""
    through, others = "", "A rented machine whose cards do not reach each other has 2 to 4 GB/s"
    if not known.reaches_peers:
        through = ", through the host's memory as GeForce cards do"
        others = "Machines differ by a factor of 3 and more"
    return (
        f"{share.num_gpus} GPUs are taken to send {rate / 1e9:.2g} GB/s each over PCIe{through}. {others}, "
        "and then another way may be faster: on the machine itself --backend cuda measures, and a file may "
        "say what nccl-tests do (docs/how-to/another-card.md)."
    )


def far_faster(answer: Answer) -> str:
    """A note where another method that gives up more is far faster than the answer; else empty.

    Full fine-tuning that waits for what is paged or sent may be far slower than an adapter, which has little
    to page or send. Where an adapter beside unquantised weights barely fits, quantised ones may need no
    checkpointing, or no other GPU.
    """
    best, faster = answer.best, answer.further if answer.allow == "recipe" else None
    if answer.allow == "numerics" and best.bound in ("transfer", "communication"):
        faster = answer.best_by_class.get("recipe")
    if faster is None or answer.measured is not None:
        return ""
    method = faster.config.method
    times = (faster.tokens_per_second or 0.0) / (best.tokens_per_second or math.inf)
    if times < FAR_FASTER or method == best.config.method:
        return ""
    return (
        f"{_method(method)} gives up more than {_method(best.config.method)} and is predicted to be up to "
        f"{times:.1f} times as fast: --method {method} searches it alone."
    )


def compiled_room(answer: Answer) -> str:
    """The room that is kept for a compiled step, and why; empty for others, or if measured."""
    if answer.measured is not None or not answer.best.config.is_compiled:
        return ""
    return (
        f"torch.compile: {100 * COMPILED_SHARE:.0f} % of what is reserved are kept as room. Of some twenty "
        "compiled steps, run without a card, one reserved so much more than predicted."
    )


def coarse_batch(answer: Answer) -> str:
    """A note where the effective batch has no divisor near the micro-batch, and memory is left; else empty.

    37 samples can be cut into 1 or 37 alone. What another batch brings is not priced: it was not searched.
    """
    best = answer.best
    config, size = best.config, best.config.micro_batch_size
    samples = size * config.gradient_accumulation_steps
    larger = next((n for n in range(size + 1, samples + 1) if samples % n == 0), samples)
    twice_bytes = (
        best.resident_bytes + best.breakdown.activations_bytes + best.breakdown.logits_bytes
    )
    has_room = twice_bytes <= answer.workload.memory_budget_bytes
    if larger <= 2 * size or not has_room or config.num_generations is not None:
        return ""
    near = max(1, round(samples / (4 * size))) * 4 * size
    batch = near * config.data_parallel_size
    each = " on each GPU" if config.data_parallel_size > 1 else ""
    return (
        f"{samples} samples{each} cannot be cut into micro-batches between {size} and {larger}, for which "
        f"there may be room: --effective-batch {batch} allows {2 * size} and {4 * size}."
    )


def compared_apart(config: TrainConfig) -> str:
    """A note where each GPU compares its own samples, and one GPU would compare all; else empty."""
    row = TRAINERS[config.trainer]
    if not row.compares_all or config.data_parallel_size == 1:
        return ""
    return (
        f"Each GPU compares the {config.micro_batch_size} {row.sample}s of its own micro-batch; one GPU "
        f"would compare all {config.effective_batch_size}."
    )


def host_memory(estimate: Estimate, limit_bytes: int | None) -> list[tuple[str, str]]:
    """A row on the host memory that all GPUs take, and what they may; none where they take none."""
    if not estimate.host_bytes:
        return []
    said = f"{format_bytes(estimate.all_host_bytes)} of host memory"
    if limit_bytes is None:
        if estimate.host_bytes > SANE_HOST_BYTES:
            said += f", more than the {format_bytes(SANE_HOST_BYTES)} that many machines have"
        return [("host", f"{said} (--host-mem limits it)")]
    if lacking_bytes := estimate.lacks_on_host(limit_bytes):
        return [("host", f"{said}, {format_bytes(lacking_bytes)} too much")]
    spare = format_bytes(limit_bytes - estimate.all_host_bytes)
    return [("host", f"{said}, {spare} of {format_bytes(limit_bytes)} to spare")]


def experts(answer: Answer) -> str:
    """The experts' part in what LoRA trains; empty where there are none."""
    if answer.reaches_experts is None:
        return ""
    count = format_count(answer.best.parameters.trainable)
    if answer.reaches_experts:
        return f"LoRA on all-linear reaches the experts too, which PEFT targets by name: {count} train."
    return (
        f"LoRA on all-linear does not reach the experts: they are tensors of their own, no linear layers. "
        f"{count} weights train, those of the other layers."
    )


def instead_of(config: TrainConfig) -> str:
    """Commands to type where a configuration does not fit, in words."""
    search = "autotune find with this model and card looks for the fastest that fits"
    if config.activation_checkpointing or TRAINERS[config.trainer].task:
        return search
    return f"--checkpointing solve recomputes no more than it has to; {search}"


def unfused_casts(config: TrainConfig) -> str:
    """A note on fp8 without torch.compile; empty for other configurations."""
    if not PRECISIONS[config.precision].fp8 or config.torch_compile != "none":
        return ""
    return (
        "Without torch.compile every cast to fp8 runs in kernels of its own: more memory and, except for "
        "very wide layers, more time than with bfloat16 (pytorch/ao issue 685). TrainingArguments has "
        "no field for it: train.py and accelerate_config.yaml switch it on."
    )


def sureness(answer: Answer) -> str:
    """How sure the prediction is that its answer is the fastest; empty where nothing is known."""
    sure = answer.sureness
    if sure is None:
        return ""
    share = 100 * NOISE
    said = f"{100 * sure.odds:.0f} % that nothing else of its class is faster by more than {share:.0f} %"
    if sure.rival is None:
        return said
    rival = difference(sure.rival.config, answer.best.config)
    return f"{said}; with {100 * sure.rival_odds:.0f} % the fastest is {rival}"


def tied(answer: Answer) -> str:
    first = difference(answer.tied[0].config, answer.best.config)
    more = f" and {len(answer.tied) - 1} more" if len(answer.tied) > 1 else ""
    return f"within {100 * NOISE:.0f} %, so no worse: {first}{more}"


def learning_rate(answer: Answer) -> str:
    """The learning rate that the files say, and whose it is."""
    return learning_rates.words(answer.best.config, answer.workload.extra)


def fallbacks(answer: Answer) -> str:
    """Plan B: what each fallback changes, and what it takes."""
    before, said = answer.best, []
    for fallback in answer.fallbacks:
        what = difference(fallback.config, before.config)
        said.append(f"{what} ({format_bytes(fallback.peak_reserved_bytes)} reserved)")
        before = fallback
    return f"when memory runs out, train.py goes on with {'; then '.join(said)}"


def widened(answer: Answer) -> str:
    """The reason why the answer is of a higher class than was wanted; empty where it is not."""
    if not answer.widened:
        return ""
    lower = TRADEOFF_CLASSES[: TRADEOFF_CLASSES.index(answer.best_class)]
    waiting = max(
        (each for name, each in answer.best_by_class.items() if name in lower),
        key=lambda each: each.tokens_per_second or 0.0,
        default=None,
    )
    if waiting is not None:
        method = _method(waiting.config.method)
        return (
            f"{method[:1].upper()}{method[1:]} needs host memory for what does not fit ({speed(waiting)}), "
            "so another recipe was allowed: --allow numerics keeps to it."
        )
    is_there = not set(lower) <= set(answer.classes_outside)
    fits = "is traced and fits" if answer.base_refused else "fits"
    nothing = f"Nothing of a lower class {fits}" if is_there else "The space has no lower class"
    return f"{nothing}, so another recipe was allowed."
