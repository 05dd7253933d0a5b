"""How many probes a search needs: autotune's sampler against Optuna's, on tables of configurations.

    python -m validation.sampler [--seeds 20] [--probes 24]

writes the tables of studies/sampler/README.md. Without --sweep the tables are SYNTHETIC: an invented
model of cost stands for the predictions, and what would be measured is that prediction times hidden
factors, one per value of each knob (time 0.6 to 1.6, memory 0.95 to 1.08), times a factor of each
configuration alone (3 % and 0.5 %); a probe adds 1 % of noise. That is the form that the sampler
assumes; in the family "crossed" pairs of knobs have hidden factors as well, which it does not know of.
The tables say how well a search corrects wrong predictions, nothing of how wrong autotune's are.

    python -m validation.sampler --sweep FILE --model MODEL --gpu GPU

prints the same for a recorded sweep: a JSON line per Measurement, all of one model and one budget,
predicted for that card by this version of autotune.

Optuna's samplers know nothing of the predictions. They are spared what would not be probed in earnest:
a configuration that is not in the table, or one a second time, costs them no probe.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution

from autotune.common.units import GIB
from autotune.probe.sampler import Candidate, PredictionSampler
from autotune.records.estimate import TraceSpec
from autotune.records.measurement import measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.store.predicted_trials import CONSTRAINT

README = Path(__file__).parents[1] / "studies" / "sampler" / "README.md"

MEASUREMENT_NOISE = 0.01
WITHIN = 0.98
"""A search has found the best when what it found is at most 2 % slower."""
MAX_IN_VAIN = 50
"""Proposals in a row that are no new row of the table: some samplers go on like that for ever."""

EFFECTIVE_BATCH_SIZE = 32
CROSSED = 1.1
"""Largest factor of a pair of knobs, in the family that breaks the sampler's assumption."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A candidate, and what a probe of it would see."""

    candidate: Candidate
    tokens_per_second: float | None
    """None where it runs out of memory."""
    excess_bytes: float
    """Peak minus the budget; of what ran out of memory at least so much."""

    @property
    def fits(self) -> bool:
        return self.tokens_per_second is not None and self.excess_bytes <= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Every configuration of a space, probed."""

    name: str
    budget_bytes: int
    rows: Sequence[Row]

    @property
    def best(self) -> float:
        """Tokens per second of the fastest that fits: what a full sweep finds."""
        return max(row.tokens_per_second or 0.0 for row in self.rows if row.fits)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Of every parameter: its values, as a choice."""
        values: dict[str, dict[Any, None]] = {}
        for row in self.rows:
            for name, value in row.candidate.params.items():
                values.setdefault(name, {})[value] = None
        return {name: CategoricalDistribution(tuple(each)) for name, each in values.items()}

    def find(self, params: Mapping[str, Any]) -> int | None:
        """Number of the row with these parameters; None where there is none.

        A row may lack some: a full fine-tune has no rank, whatever rank was drawn.
        """
        for number, row in enumerate(self.rows):
            if row.candidate.params.items() <= params.items():
                return number
        return None


def _configs(**domains: Sequence[Any]) -> Iterator[TrainConfig]:
    for values in itertools.product(*domains.values()):
        settings = dict(zip(domains, values, strict=True))
        base = settings.pop("base", {})
        size = settings["micro_batch_size"]
        yield TrainConfig(
            gradient_accumulation_steps=EFFECTIVE_BATCH_SIZE // size,
            sequence_length=1024,
            **{"precision": "bf16-true", "optimizer": "adamw_torch_fused"} | base | settings,
        )


_SIZES = (1, 2, 4, 8, 16, 32)
_LORA = {"method": "lora", "precision": "bf16-autocast", "lora_targets": "all-linear"}
_QLORA = {**_LORA, "method": "qlora", "lora_rank": 16}

FAMILIES: dict[str, Callable[[], Iterator[TrainConfig]]] = {
    "full": lambda: _configs(
        base=[{"method": "full"}],
        precision=["bf16-true", "bf16-mixed"],
        optimizer=["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "lion_8bit"],
        activation_checkpointing=[0, 1, 2],
        attention=["eager", "sdpa"],
        micro_batch_size=_SIZES,
    ),
    "lora": lambda: _configs(
        base=[_LORA],
        lora_rank=[8, 64],
        lora_targets=["attention", "all-linear"],
        optimizer=["adamw_torch", "adamw_torch_fused"],
        activation_checkpointing=[0, 1, 2],
        attention=["eager", "sdpa"],
        micro_batch_size=_SIZES,
    ),
    "methods": lambda: itertools.chain.from_iterable(
        _configs(
            base=[
                {"method": "full", "precision": "bf16-autocast"},
                {**_LORA, "lora_rank": 16},
                {**_QLORA, "quantization": "nf4"},
                {**_QLORA, "quantization": "nf4-double"},
            ],
            activation_checkpointing=strides,
            activation_offloading=offloading,
            attention=["eager", "sdpa"],
            micro_batch_size=_SIZES,
        )
        for strides, offloading in (([0], [False]), ([1, 2], [False, True]))
    ),
}
"""The synthetic spaces: 288, 288 and 240 configurations."""


def names_that_vary(configs: Sequence[TrainConfig]) -> list[str]:
    """The settings that are parameters of the search. Accumulation follows from the micro-batch."""
    settings = [config.to_dict() for config in configs]
    return [
        name
        for name in settings[0]
        if name != "gradient_accumulation_steps" and len({each[name] for each in settings}) > 1
    ]


def invented_cost(config: TrainConfig) -> tuple[float, float]:
    """(tokens per second, peak bytes) of a model that does not exist, in the right proportions."""
    seconds = {"full": 1.0, "lora": 0.8, "qlora": 1.05}[config.method]
    seconds *= {0: 1.0, 1: 1.33, 2: 1.17}[config.activation_checkpointing]
    seconds *= 1.25 if config.attention == "eager" else 1.0
    seconds *= 1.2 if config.precision == "bf16-mixed" else 1.0
    seconds *= 1.1 if config.activation_offloading else 1.0
    seconds *= 1 + 0.8 / config.micro_batch_size
    seconds += 0.05 if config.optimizer == "adamw_torch" else 0.02
    state_gib = {"adamw_bnb_8bit": 10.0, "lion_8bit": 8.0}.get(config.optimizer, 16.0)
    if config.method == "full":
        weights_gib = state_gib * (1.25 if config.precision == "bf16-mixed" else 1.0)
    else:
        weights_gib = 2.2 if config.method == "lora" else 0.8
        weights_gib += 0.005 * (config.lora_rank or 0)
    activations_gib = 1.5 * {0: 1.0, 1: 0.15, 2: 0.5}[config.activation_checkpointing]
    activations_gib *= 1.5 if config.attention == "eager" else 1.0
    activations_gib *= 0.3 if config.activation_offloading else 1.0
    total_gib = 0.5 + weights_gib + config.micro_batch_size * (activations_gib + 0.6)
    return 4000 / seconds, total_gib * GIB


def synthetic(family: str, seed: int, *, crossed: float = 0.0) -> Table:
    """A table of that family with hidden factors by seed; half of it is predicted to fit.

    `crossed`: pairs of knobs have factors of time too, of 1 / crossed to crossed.
    """
    rng = np.random.default_rng([seed, sorted(FAMILIES).index(family)])
    configs = list(FAMILIES[family]())
    varying = names_that_vary(configs)
    candidates = []
    for config in configs:
        speed, peak_bytes = invented_cost(config)
        candidates.append(
            Candidate.of(
                config, varying, tokens_per_second=speed, peak_device_bytes=round(peak_bytes)
            )
        )
    budget_bytes = round(statistics.median(c.peak_device_bytes for c in candidates))
    log_time, log_memory = np.zeros(len(candidates)), np.zeros(len(candidates))
    names = sorted({name for c in candidates for name in c.knobs})
    shares = [_shares([c.knobs.get(name) for c in candidates]) for name in names]
    for share in itertools.chain.from_iterable(shares):
        time_factor, memory_factor = rng.uniform(np.log([0.6, 0.95]), np.log([1.6, 1.08]))
        log_time += time_factor * share
        log_memory += memory_factor * share
    if crossed:
        for one, other in itertools.combinations(shares, 2):
            for share, other_share in itertools.product(one, other):
                log_time += rng.uniform(np.log(1 / crossed), np.log(crossed)) * share * other_share
    log_time += rng.normal(0, 0.03, len(candidates))
    log_memory += rng.normal(0, 0.005, len(candidates))
    rows = []
    slower, larger = np.exp(log_time).tolist(), np.exp(log_memory).tolist()
    for candidate, time_factor, memory_factor in zip(candidates, slower, larger, strict=True):
        excess_bytes = candidate.peak_device_bytes * memory_factor - budget_bytes
        speed = candidate.tokens_per_second / time_factor
        rows.append(
            Row(
                candidate=candidate,
                tokens_per_second=None if excess_bytes > 0 else speed,
                # The request that fails says only a part of what is lacking.
                excess_bytes=excess_bytes if excess_bytes <= 0 else excess_bytes / 4,
            )
        )
    return Table(name=family, budget_bytes=budget_bytes, rows=rows)


def _shares(values: Sequence[str | bool | float | None]) -> list[np.ndarray[Any, Any]]:
    """How much of each hidden factor of a knob a candidate has: its value's; a number's, in part.

    A knob that all share has none, so that a new one leaves the tables as they were.
    """
    if len(set(values)) == 1:
        return []
    if any(isinstance(value, float) for value in values):
        numbers = np.array([float(value or 0) for value in values])
        return [numbers / numbers.max()]
    return [
        np.array([float(value == other) for value in values])
        for other in sorted(set(values), key=str)
    ]


def swept(path: Path, model_name: str, gpu_name: str) -> Table:
    """The table of a recorded sweep, with today's predictions. Raises ValueError for mixed budgets."""
    from autotune.catalogue.gpus import cpu_stand_in, find_gpu
    from autotune.catalogue.models import resolve
    from autotune.predict.estimator import Estimator
    from autotune.predict.tracing import trace_all

    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    # A record of tools/gpu_check holds the measurement beside the prediction of its day.
    all_of_them = [measurement_from_dict(r.get("measurement", r)) for r in records]
    measurements = [m for m in all_of_them if m.outcome in ("ok", "oom")]
    budgets = {m.spec.memory_budget_bytes for m in measurements}
    if len(budgets) != 1:
        raise ValueError(f"{path}: a sweep has one budget, not {len(budgets)}")
    budget_bytes = budgets.pop()
    model = resolve(model_name)
    gpu = cpu_stand_in() if gpu_name == "cpu" else find_gpu(gpu_name)
    first = measurements[0]
    specs = {TraceSpec.of(m.config) for m in measurements}
    traces = trace_all(model, first.spec.task, first.config.sequence_length, gpu, specs)
    estimator = Estimator(traces, gpu, memory_budget_bytes=budget_bytes)
    varying = names_that_vary([m.config for m in measurements])
    rows = []
    for measurement in measurements:
        estimate = estimator.estimate(measurement.config)
        over_bytes = measurement.over_budget_bytes
        assert estimate.tokens_per_second is not None
        assert over_bytes is not None
        candidate = Candidate.of(
            measurement.config,
            varying,
            tokens_per_second=estimate.tokens_per_second,
            peak_device_bytes=estimate.peak_device_bytes,
        )
        rows.append(
            Row(
                candidate=candidate,
                tokens_per_second=measurement.tokens_per_second,
                excess_bytes=over_bytes,
            )
        )
    return Table(name=path.stem, budget_bytes=budget_bytes, rows=rows)


class Probes:
    """Stands for the card: says what a row's probe would, and keeps the best that fits."""

    def __init__(self, table: Table, seed: int) -> None:
        self._table = table
        self._rng = np.random.default_rng([seed, 1])
        self._noise = np.exp(self._rng.normal(0, MEASUREMENT_NOISE, len(table.rows)))
        self.probed: dict[int, None] = {}
        """Numbers of the rows, in the order in which they were asked for."""

    def tell(self, study: optuna.Study, trial: optuna.Trial) -> None:
        """Tell the study what the trial's configuration does."""
        number = self._table.find(trial.params)
        if number is None:
            # Failed trials are as good as deleted to Optuna's samplers: they learn nothing from it.
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        self.probed[number] = None
        row = self._table.rows[number]
        trial.set_constraint(CONSTRAINT, row.excess_bytes)
        if row.tokens_per_second is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, row.tokens_per_second * float(self._noise[number]))

    def curve(self, num_probes: int) -> list[float]:
        """Best true speed after each probe, over the best of the table; flat after the last."""
        speeds = [
            row.tokens_per_second or 0.0 if row.fits else 0.0
            for row in (self._table.rows[number] for number in self.probed)
        ][:num_probes]
        best = list(itertools.accumulate(speeds, max)) or [0.0]
        best += best[-1:] * (num_probes - len(best))
        return [speed / self._table.best for speed in best]


Search = Callable[[Table, int, int], Probes]
"""(table, seed, number of probes) -> what it probed."""


def sampler_of(table: Table, seed: int) -> tuple[PredictionSampler, optuna.Study]:
    """autotune's sampler for a table, and a study that has it."""
    sampler = PredictionSampler(
        [row.candidate for row in table.rows],
        distributions=table.distributions,
        budget_bytes=table.budget_bytes,
        seed=seed,
    )
    return sampler, optuna.create_study(direction="maximize", sampler=sampler)


def predictions_corrected(table: Table, seed: int, num_probes: int) -> Probes:
    """autotune's sampler, until it stops."""
    sampler, study = sampler_of(table, seed)
    probes = Probes(table, seed)
    while len(probes.probed) < num_probes and not sampler.should_stop(study):
        candidate = sampler.propose(study)
        assert candidate is not None
        probes.tell(study, study.ask(sampler.search_space(candidate)))
    return probes


def predictions_in_order(table: Table, seed: int, _num_probes: int) -> Probes:
    """No learning: what is predicted to fit, fastest first."""
    probes = Probes(table, seed)
    fitting = [
        (row.candidate.tokens_per_second, number)
        for number, row in enumerate(table.rows)
        if row.candidate.peak_device_bytes <= table.budget_bytes
    ]
    probes.probed = dict.fromkeys(number for _, number in sorted(fitting, reverse=True))
    return probes


def with_optuna(make: Callable[[int], optuna.samplers.BaseSampler]) -> Search:
    def search(table: Table, seed: int, num_probes: int) -> Probes:
        study = optuna.create_study(direction="maximize", sampler=make(seed))
        probes = Probes(table, seed)
        num_in_vain = 0
        while len(probes.probed) < num_probes and num_in_vain < MAX_IN_VAIN:
            num_before = len(probes.probed)
            probes.tell(study, study.ask(table.distributions))
            num_in_vain = num_in_vain + 1 if len(probes.probed) == num_before else 0
        return probes

    return search


SEARCHES: dict[str, Search] = {
    "autotune's sampler": predictions_corrected,
    "predicted order, no learning": predictions_in_order,
    "Optuna random": with_optuna(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    "Optuna TPE": with_optuna(lambda seed: optuna.samplers.TPESampler(seed=seed)),
    "Optuna GP": with_optuna(lambda seed: optuna.samplers.GPSampler(seed=seed)),
}
SHOWN = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)


def report(tables: Mapping[str, Callable[[int], Table]], seeds: int, num_probes: int) -> str:
    """Markdown: a table per family, a row per search."""
    shown = [n for n in SHOWN if n <= num_probes]
    head = "".join(f" {n} |" for n in shown)
    text = []
    for name, table_of in tables.items():
        lines = [
            f"| {name} |{head} within 2 % at 12 | probes | OOM |",
            "|---" * (len(shown) + 4) + "|",
        ]
        tables_by_seed = [table_of(seed) for seed in range(seeds)]
        for label, search in SEARCHES.items():
            if label == "Optuna GP" and not importlib.util.find_spec("scipy"):
                continue
            started = time.monotonic()
            found = [search(table, seed, num_probes) for seed, table in enumerate(tables_by_seed)]
            lines.append(_line(label, found, tables_by_seed, shown, num_probes))
            print(f"{name}: {label}: {time.monotonic() - started:.0f} s", flush=True)
        text.append("\n".join(lines))
    return "\n\n".join(text)


def _line(
    label: str,
    found: Sequence[Probes],
    tables: Sequence[Table],
    shown: Iterable[int],
    num_probes: int,
) -> str:
    curves = [probes.curve(num_probes) for probes in found]
    medians = "".join(f" {statistics.median(c[n - 1] for c in curves):.3f} |" for n in shown)
    at = min(12, num_probes) - 1
    hits = sum(curve[at] >= WITHIN for curve in curves)
    used = [list(probes.probed)[:num_probes] for probes in found]
    num_oom = statistics.mean(
        sum(not table.rows[number].fits for number in numbers)
        for table, numbers in zip(tables, used, strict=True)
    )
    num_used = statistics.mean(map(len, used))
    return f"| {label} |{medians} {hits} of {len(curves)} | {num_used:.1f} | {num_oom:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--probes", type=int, default=24)
    parser.add_argument("--sweep", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--gpu")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.sweep:
        if not (options.model and options.gpu):
            parser.error("--sweep needs --model and --gpu")
        table = swept(options.sweep, options.model, options.gpu)
        print(report({table.name: lambda _: table}, options.seeds, options.probes))
        return
    tables: dict[str, Callable[[int], Table]] = {
        family: functools.partial(synthetic, family) for family in FAMILIES
    }
    tables["methods, crossed"] = functools.partial(synthetic, "methods", crossed=CROSSED)
    text = report(tables, options.seeds, options.probes)
    print(text)
    readme = README.read_text(encoding="utf-8")
    parts = re.compile(r"(<!-- curves -->\n).*?(<!-- end curves -->)", re.DOTALL)
    written, num_places = parts.subn(lambda m: f"{m[1]}{text}\n{m[2]}", readme)
    assert num_places == 1, f"{README} has no place for the curves"
    README.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
