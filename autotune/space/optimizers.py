"""The optimizers that TrainingArguments(optim=...) may name, one row each, and those left out.

OPTIMIZERS and LEFT_OUT together are transformers.training_args.OptimizerNames
(tests/contracts/test_optimizer_libraries.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.memory.allocator import Tape
from autotune.memory.optimizers import Algorithm, StepCost, TensorSpec
from autotune.memory.optimizers.core import NO_COST, States
from autotune.memory.optimizers.eager import Adafactor, AdaLomo, GrokAdamW, Lomo
from autotune.memory.optimizers.kernels import BitsAndBytes, StableAdamW, TorchAo
from autotune.memory.optimizers.low_rank import (
    Apollo,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    RandomProjection,
    SvdProjection,
)
from autotune.memory.optimizers.torch_lists import ScheduleFree, TensorLists


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """One `optim` value of TrainingArguments."""

    name: str
    family: str
    """Name of the family, such as adamw or lion: another family is another training run."""
    state_format: str
    """Storage of the state: `parameter` (the dtype of the parameter), `32bit`, `8bit`, ... or `none`. Within
    a family, another format is another rounding."""
    needs: str = ""
    """Package beyond torch and transformers, by the name that pip knows; or nothing."""
    class_name: str
    """Name of the innermost torch.optim.Optimizer."""
    moments: int
    """Values per parameter that the textbook counts; 0 too where it has rows and columns."""
    algorithm: Algorithm
    updates: str = ""
    """Moment at which a weight is updated in the backward pass, so that gradients are never all there:
    `at-once`, as soon as its gradient is, or `one-behind`, when the next one comes, its own given up first.
    Empty: after it."""
    steps_alone: bool = True
    """Whether a step of one weight is that weight's part of a step of all: steps are counted, and state is
    made, for each by itself."""
    only_full: bool = False
    """Whether it is of use, and built by the Trainer as priced, only where whole weights train."""
    keeps_rounding: bool = False
    """Whether updates too small for 16-bit weights count all the same: their error is kept, or they are
    rounded up or down at random (stochastic rounding)."""
    compiles: bool = False
    """Whether it compiles its update for each shape that is trained, in its first step (torch.compile)."""
    only_cuda: bool = False
    """Whether its code calls CUDA, or is compiled, which a probe's tracker cannot watch: none on a CPU."""
    arguments: tuple[tuple[str, object], ...] = ()
    """TrainingArguments that belong to it."""
    state_note: str = ""
    """Reason why its state is not what the textbook counts, where that is not the dtype alone."""
    note_of_16_bits: bool = False
    """Whether the reason holds for 16-bit weights alone."""
    source: str

    @property
    def paged(self) -> bool:
        """Whether state may live in CUDA managed memory."""
        return isinstance(self.algorithm, BitsAndBytes) and self.algorithm.paged

    @property
    def module(self) -> str:
        """Name that imports the package; empty where none is needed."""
        return _MODULES.get(self.needs) or self.needs.replace("-", "_")

    def managed_bytes(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes of its state that live in CUDA managed memory."""
        return self._bytes_in("managed", specs) if self.paged else 0

    def host_bytes(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes of its state that wait in host memory."""
        return self._bytes_in("host", specs)

    def _bytes_in(self, place: str, specs: Sequence[TensorSpec]) -> int:
        states = (state for spec in specs for state in self.algorithm.state(spec))
        return sum(state.size_bytes for state in states if state.place == place)

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        """Cost of all its updates in a step."""
        if not self.updates:
            return self.algorithm.cost(specs)
        costs = (self.algorithm.cost([spec]).times(count) for spec, count in Counter(specs).items())
        return sum(costs, NO_COST)

    def write_state(self, tape: Tape, specs: Sequence[TensorSpec]) -> States:
        """Append a first step, each parameter's by itself where that is when it is updated."""
        if not self.updates:
            return self.algorithm.write_step(tape, specs, None)
        write = self.writer_of_one(tape)
        return [write(spec, None)[0] for spec in specs]

    def writer_of_one(self, tape: Tape) -> Callable[[TensorSpec, States | None], States]:
        """Return a function that appends a step of one parameter, as Algorithm.write_step does.

        What one optimizer has for all of its parameters, the first brings.
        """
        algorithm = self.algorithm

        def write(spec: TensorSpec, states: States | None) -> States:
            nonlocal algorithm
            states = algorithm.write_step(tape, [spec], states)
            if isinstance(algorithm, BitsAndBytes) and algorithm.quantises(spec):
                algorithm = dataclasses.replace(algorithm, has_code_books=True)
            return states

        return write


_MODULES = {"torch-optimi": "optimi"}


_TORCH_ADAMW = "torch 2.13 optim/adam.py, transformers 5.23 trainer_optimizer.py"
_BITSANDBYTES = "bitsandbytes 0.50 optim/, transformers 5.23 trainer_optimizer.py"
_TORCHAO = "torchao 0.18 optim/adam.py, transformers 5.23 trainer_optimizer.py"
_GALORE = "galore-torch 1.0, transformers 5.23 trainer_optimizer.py: _setup_low_rank_optimizer"
_APOLLO = "apollo-torch 1.0, transformers 5.23 trainer_optimizer.py: _setup_low_rank_optimizer"
_SCHEDULE_FREE = "schedulefree 1.4, transformers 5.23 trainer_optimizer.py"
_LOMO = "lomo-optim 0.1, accelerate 1.15 accelerator.py: lomo_backward"

# Kernels with weight_decay 0, as (tensor lists in the launch, tensors read or written).
# _multi_tensor_adam: lerp_, mul_, addcmul_, sqrt, div_, add_, addcdiv_.
_FOREACH_ADAMW = ((2, 3), (1, 2), (3, 3), (2, 2), (1, 2), (1, 2), (3, 4))
# _fused_adamw_: parameter and two moments are read and written, the gradient read.
_FUSED_ADAMW = ((4, 7),)
# _foreach_add_(parameters, gradients, alpha=-lr).
_FOREACH_SGD = ((2, 3),)
# _multi_tensor_rmsprop: mul_, addcmul_, sqrt, add_, addcdiv_.
_FOREACH_RMSPROP = ((1, 2), (3, 3), (2, 2), (1, 2), (3, 4))
# _multi_tensor_adagrad: addcmul_, sqrt, add_, mul, addcdiv_.
_FOREACH_ADAGRAD = ((3, 3), (2, 2), (1, 2), (2, 2), (3, 4))
# schedulefree: lerp_, add_ and sub_ of SGD; before them Adam's mul_, addcmul_, div, sqrt_, add_, div_.
_FOREACH_FREE_SGD = ((2, 3), (2, 3), (2, 3))
_FOREACH_FREE_ADAMW = ((1, 2), (3, 3), (2, 2), (1, 2), (1, 2), (2, 3), *_FOREACH_FREE_SGD)


_OF_BITSANDBYTES = {
    "adamw": ("AdamW", BitsAndBytes(num_states=2, bits=32)),
    "ademamix": ("AdEMAMix", BitsAndBytes(num_states=2, bits=32, slow_average=True)),
    "lion": ("Lion", BitsAndBytes(num_states=1, bits=32)),
    "rmsprop": ("RMSprop", BitsAndBytes(num_states=1, bits=32)),
}
"""Class by family, and what it does with float32 state."""


def _bitsandbytes(name: str, family: str) -> Optimizer:
    # Bits and paging are read off the name, as the Trainer does it.
    bits = 8 if "8bit" in name else 32
    class_name, plain = _OF_BITSANDBYTES[family]
    algorithm = dataclasses.replace(plain, bits=bits, paged=name.startswith("paged_"))
    small = "8-bit moments and their scales; small tensors in float32"
    return Optimizer(
        name=name,
        family=family,
        state_format=f"{bits}bit",
        needs="bitsandbytes",
        class_name=class_name,
        moments=plain.num_states + plain.slow_average,
        algorithm=algorithm,
        state_note=small if bits == 8 else "",
        source=_BITSANDBYTES,
    )


def _torchao(name: str, bits: int) -> Optimizer:
    return Optimizer(
        name=name,
        family="adamw",
        state_format=f"torchao {bits}bit",
        needs="torchao",
        class_name=f"AdamW{bits}bit",
        moments=2,
        algorithm=TorchAo(bits=bits),
        compiles=True,
        only_cuda=True,
        # Of weights in bfloat16 only (torchao 0.18, single_param_adam).
        arguments=(("optim_args", "bf16_stochastic_round=True"),),
        keeps_rounding=True,
        state_note=f"{bits}-bit moments and their scales; small tensors as they are",
        source=_TORCHAO,
    )


def _low_rank(
    name: str,
    family: str,
    class_name: str,
    algorithm: Algorithm,
    *,
    moments: int = 2,
    state_format: str = "parameter",
) -> Optimizer:
    layerwise = name.endswith("_layerwise")
    is_apollo = name.startswith("apollo")
    return Optimizer(
        name=name,
        # Layer by layer gradients are not clipped: another training run.
        family=f"{family}-layerwise" if layerwise else family,
        state_format=state_format,
        needs="apollo-torch" if is_apollo else "galore-torch",
        class_name=class_name,
        moments=moments,
        algorithm=algorithm,
        updates="at-once" if layerwise else "",
        steps_alone=False,  # Layer by layer it has another name.
        only_full=True,
        # AdamW8bit.step calls torch.cuda.synchronize.
        only_cuda=class_name == "AdamW8bit",
        arguments=(("optim_target_modules", "all-linear"),),
        state_note="moments of rank 128, and a projection of each matrix",
        source=_APOLLO if is_apollo else _GALORE,
    )


def _schedule_free(name: str, class_name: str, algorithm: ScheduleFree) -> Optimizer:
    return Optimizer(
        name=name,
        family=name,
        state_format="parameter",
        needs="schedulefree",
        class_name=class_name,
        moments=1 + algorithm.num_moments,
        algorithm=algorithm,
        steps_alone=False,
        arguments=(("lr_scheduler_type", "constant"),),
        source=_SCHEDULE_FREE,
    )


_STATISTICS = "rows and columns of float32 statistics"
_GALORE_ADAMW = GaLoreAdamW(projection=SvdProjection())
_GALORE_ADAMW_8BIT = GaLoreAdamW8bit(projection=SvdProjection())
_APOLLO_ADAMW = Apollo(projection=RandomProjection())

OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(
            name="adamw_torch",
            family="adamw",
            state_format="parameter",
            class_name="AdamW",
            moments=2,
            algorithm=TensorLists(num_moments=2, passes=_FOREACH_ADAMW, num_temporaries=1),
            source=f"{_TORCH_ADAMW}: _multi_tensor_adam",
        ),
        Optimizer(
            name="adamw_torch_fused",
            family="adamw",
            state_format="parameter",
            class_name="AdamW",
            moments=2,
            algorithm=TensorLists(num_moments=2, passes=_FUSED_ADAMW, step_on_device=True),
            source=f"{_TORCH_ADAMW}: _fused_adam",
        ),
        _torchao("adamw_torch_8bit", 8),
        _torchao("adamw_torch_4bit", 4),
        _bitsandbytes("adamw_bnb_8bit", "adamw"),
        _bitsandbytes("adamw_8bit", "adamw"),  # another name of the same
        _bitsandbytes("paged_adamw_8bit", "adamw"),
        _bitsandbytes("paged_adamw_32bit", "adamw"),
        _bitsandbytes("ademamix", "ademamix"),
        _bitsandbytes("ademamix_8bit", "ademamix"),
        _bitsandbytes("paged_ademamix_32bit", "ademamix"),
        _bitsandbytes("paged_ademamix_8bit", "ademamix"),
        _bitsandbytes("lion_32bit", "lion"),
        _bitsandbytes("lion_8bit", "lion"),
        _bitsandbytes("paged_lion_32bit", "lion"),
        _bitsandbytes("paged_lion_8bit", "lion"),
        Optimizer(
            name="rmsprop",
            family="rmsprop",
            state_format="parameter",
            class_name="RMSprop",
            moments=1,
            algorithm=TensorLists(num_moments=1, passes=_FOREACH_RMSPROP, num_temporaries=1),
            source="torch 2.13 optim/rmsprop.py: _multi_tensor_rmsprop",
        ),
        _bitsandbytes("rmsprop_bnb", "rmsprop"),
        _bitsandbytes("rmsprop_bnb_32bit", "rmsprop"),  # another name of the same
        _bitsandbytes("rmsprop_bnb_8bit", "rmsprop"),
        Optimizer(
            name="adagrad",
            family="adagrad",
            state_format="parameter",
            class_name="Adagrad",
            moments=1,
            algorithm=TensorLists(
                num_moments=1, passes=_FOREACH_ADAGRAD, num_temporaries=2, state_at_once=True
            ),
            steps_alone=False,
            source="torch 2.13 optim/adagrad.py: _multi_tensor_adagrad",
        ),
        Optimizer(
            name="adafactor",
            family="adafactor",
            state_format="32bit",
            class_name="Adafactor",
            moments=0,
            algorithm=Adafactor(),
            state_note=_STATISTICS,
            source="transformers 5.23 optimization.py Adafactor, trainer_optimizer.py",
        ),
        Optimizer(
            name="sgd",
            family="sgd",
            state_format="none",
            class_name="SGD",
            moments=0,
            algorithm=TensorLists(num_moments=0, passes=_FOREACH_SGD),
            source="torch 2.13 optim/sgd.py: _multi_tensor_sgd",
        ),
        Optimizer(
            name="lomo",
            family="lomo",
            state_format="none",
            needs="lomo-optim",
            class_name="Lomo",
            moments=0,
            algorithm=Lomo(),
            steps_alone=False,
            updates="one-behind",
            only_full=True,
            source=_LOMO,
        ),
        Optimizer(
            name="adalomo",
            family="adalomo",
            state_format="32bit",
            needs="lomo-optim",
            class_name="AdaLomo",
            moments=0,
            algorithm=AdaLomo(),
            steps_alone=False,
            updates="one-behind",
            only_full=True,
            only_cuda=True,
            state_note=_STATISTICS,
            source=_LOMO,
        ),
        _low_rank(
            "galore_adamw",
            "galore",
            "AdamW",
            _GALORE_ADAMW,
        ),
        _low_rank(
            "galore_adamw_8bit",
            "galore",
            "AdamW8bit",
            _GALORE_ADAMW_8BIT,
            state_format="8bit",
        ),
        _low_rank(
            "galore_adafactor",
            "galore-adafactor",
            "Adafactor",
            Adafactor(projection=SvdProjection()),
            moments=0,
            state_format="32bit",
        ),
        _low_rank(
            "galore_adamw_layerwise",
            "galore",
            "AdamW",
            _GALORE_ADAMW,
        ),
        _low_rank(
            "galore_adamw_8bit_layerwise",
            "galore",
            "AdamW8bit",
            _GALORE_ADAMW_8BIT,
            state_format="8bit",
        ),
        _low_rank(
            "apollo_adamw",
            "apollo",
            "AdamW",
            _APOLLO_ADAMW,
        ),
        _low_rank(
            "apollo_adamw_layerwise",
            "apollo",
            "AdamW",
            _APOLLO_ADAMW,
        ),
        _schedule_free(
            "schedule_free_radam",
            "RAdamScheduleFree",
            ScheduleFree(num_moments=1, passes=_FOREACH_FREE_ADAMW, starts_bare=True),
        ),
        _schedule_free(
            "schedule_free_adamw",
            "AdamWScheduleFree",
            ScheduleFree(num_moments=1, passes=_FOREACH_FREE_ADAMW),
        ),
        _schedule_free(
            "schedule_free_sgd",
            "SGDScheduleFree",
            ScheduleFree(num_moments=0, passes=_FOREACH_FREE_SGD),
        ),
        Optimizer(
            name="stable_adamw",
            family="stable_adamw",
            state_format="parameter",
            needs="torch-optimi",
            class_name="StableAdamW",
            moments=2,
            # Where Triton is installed it is taken, whatever the device (optimi 0.3, stableadamw.py).
            only_cuda=True,
            keeps_rounding=True,
            algorithm=StableAdamW(),
            steps_alone=False,
            state_note="the rounding error of 16-bit weights is kept too",
            note_of_16_bits=True,
            source="torch-optimi 0.3 optimi/stableadamw.py, transformers 5.23 trainer_optimizer.py",
        ),
        Optimizer(
            name="grokadamw",
            family="grokadamw",
            state_format="parameter",
            needs="grokadamw",
            class_name="GrokAdamW",
            moments=3,
            algorithm=GrokAdamW(),
            steps_alone=False,
            state_note="in host memory, fetched for every step",
            source="grokadamw 0.1 grokadamw.py, transformers 5.23 trainer_optimizer.py",
        ),
    )
}

UPDATERS: dict[str, Optimizer] = OPTIMIZERS | {
    f"{row.name} in backward": dataclasses.replace(row, updates=row.updates or "at-once")
    for row in OPTIMIZERS.values()
}
"""Optimizers by TrainConfig.updater: those of OPTIMIZERS, and each as it updates in the backward pass."""

KEEPS_NOTHING = "sgd"
"""The optimizer beside which every other needs as much memory, or more."""

LEFT_OUT: dict[str, str] = {
    "adamw_torch_xla": "runs on XLA devices (torch_xla), not on CUDA",
    "adamw_torch_npu_fused": "runs on Ascend NPUs (torch_npu), not on CUDA",
    "adamw_anyprecision": "needs torchdistx, which is archived and on no package index",
    "galore_adafactor_layerwise": "cannot be built by Transformers 5.23, which leaves relative_step "
    "on beside a learning rate, and GaLore's Adafactor refuses that",
}
"""Reasons for each value of OptimizerNames that has no row."""

DROPPED: dict[str, str] = {
    "adamw_apex_fused": "adamw_torch_fused",
    "adamw_hf": "adamw_torch",
}
"""Names that Transformers had before version 5, with the optimizer that computes the same."""


def state_bytes(name: str, specs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Return the bytes of the whole optimizer state: (on the device, in managed memory)."""
    row = OPTIMIZERS[name]
    tape = Tape()
    row.write_state(tape, specs)
    live = {event for event in tape.events if event >= 0}
    live -= {~event for event in tape.events if event < 0}
    device_bytes = sum(tape.sizes[i] for i in live if tape.categories[i] == "optimizer_state")
    return device_bytes, row.managed_bytes(specs)
