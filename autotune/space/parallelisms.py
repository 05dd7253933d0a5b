"""Ways for the GPUs of one machine to share a training run, one row each (PARALLELISMS)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """A way for the GPUs of one machine to share a training run."""

    name: str
    library: str
    """Library whose rules decide what a GPU holds: torch or deepspeed. Empty: there is one GPU."""
    stage: int = 0
    """Stage of ZeRO: 0 every GPU holds all of it; 1 a part of the optimizer's state; 2 of the gradients too;
    3 of the weights too, which are gathered layer by layer. FSDP2 is a stage 3."""
    offload: bool = False
    """Whether what is shared out waits in host memory, where the optimizer runs."""
    traced_as: tuple[tuple[str, str], ...] = ()
    """Pairs (precision, the one whose kernels run): the library casts the weights, not autocast."""
    optimizers: tuple[str, ...] = ()
    """Values of `optim` that it works with; empty: all."""
    keeps_gathered: bool = False
    """Whether weights that FSDP2 gathered for the forward pass stay until the backward pass has used them
    (`reshard_after_forward` off): less is sent, and every GPU holds all of them for a while."""
    num_replicas: int = 1
    """Groups of GPUs that each hold all that is shared out (FSDP2's dp_replicate_size)."""
    splits: bool = False
    """Whether each layer's products are split among the GPUs, which have the same micro-batches; otherwise
    every GPU has its own."""

    splits_sequences: bool = False
    """Whether each sequence is split among the GPUs, which share out weights as fsdp2 does."""

    deals_layers: bool = False
    """Whether each GPU has whole layers of its own, and one process has them work one after the other."""

    schedules: bool = False
    """Whether these work at the same time, each in a process of its own, on micro-batches one behind the
    other. No trainer that is installed runs that."""

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shares out weights, and gathers them layer by layer."""
        return self.library == "torch" and self.stage == 3

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed shares the run out, and takes the optimizer's step."""
        return self.library == "deepspeed"

    @property
    def shares_packed(self) -> bool:
        """Whether 4-bit weights, packed in the dtype that is computed with, are shared out, too."""
        return self.name in ("fsdp2", "fsdp2-no-reshard")

    @property
    def has_parts(self) -> bool:
        """Whether weights are torch's DTensors, each of which stands for this GPU's part of one."""
        return self.is_fsdp or self.splits

    @property
    def is_launched(self) -> bool:
        """Whether every GPU has a process of its own, as `accelerate launch` starts them."""
        return bool(self.library) and (self.schedules or not self.deals_layers)

    def data_parallel_size(self, num_gpus: int) -> int:
        """Number of micro-batches that so many GPUs work on at the same time."""
        return 1 if self.splits or self.splits_sequences or self.deals_layers else num_gpus


# accelerate 1.15 utils/fsdp_utils.py fsdp2_prepare_model: float32 shards, gathered in 16 bits.
_FSDP2_TRACED_AS = (("bf16-mixed", "bf16-autocast"), ("fp16-mixed", "fp16-autocast"))
# deepspeed 0.19.8 runtime/engine.py _cast_module_mixed_precision: 16-bit weights, no autocast.
_ZERO_TRACED_AS = (("bf16-mixed", "bf16-true"), ("fp16-mixed", "fp16-autocast"))
# Element by element, so that a part of a tensor is updated as in the whole. bitsandbytes' kernels do
# not take the DTensors of FSDP2 (tests/contracts/test_parallel_real.py shows it).
_FSDP2_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
# DTensors beside plain ones: the fused kernel takes no mixture (tests/contracts/test_parallel_real.py).
_TP_OPTIMIZERS = ("adamw_torch", "sgd")
# Those that were run without a card (studies/device-map).
_DEALT_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adamw_bnb_8bit")
_ZERO_OPTIMIZERS = (
    *_FSDP2_OPTIMIZERS, "adamw_bnb_8bit", "lion_32bit", "lion_8bit"
)  # fmt: skip
# accelerate 1.15 utils/deepspeed.py: it takes the place of torch.optim.AdamW.
_CPU_ADAM = ("adamw_torch", "adamw_torch_fused")


def _fsdp2(offload: bool) -> Parallelism:
    return Parallelism(
        name="fsdp2-offload" if offload else "fsdp2",
        library="torch",
        stage=3,
        offload=offload,
        traced_as=_FSDP2_TRACED_AS,
        optimizers=_CPU_ADAM if offload else _FSDP2_OPTIMIZERS,
    )


def _zero(stage: int, offload: bool) -> Parallelism:
    return Parallelism(
        name=f"zero{stage}-offload" if offload else f"zero{stage}",
        library="deepspeed",
        stage=stage,
        offload=offload,
        traced_as=_ZERO_TRACED_AS,
        optimizers=_CPU_ADAM if offload else _ZERO_OPTIMIZERS,
    )


PARALLELISMS: dict[str, Parallelism] = {
    row.name: row
    for row in (
        Parallelism(
            name="none",
            library="",
        ),
        Parallelism(
            name="ddp",
            library="torch",
        ),
        _fsdp2(False),
        _fsdp2(True),
        dataclasses.replace(_fsdp2(False), name="fsdp2-no-reshard", keeps_gathered=True),
        Parallelism(
            name="hsdp",
            library="torch",
            stage=3,
            traced_as=_FSDP2_TRACED_AS,
            optimizers=_FSDP2_OPTIMIZERS,
            num_replicas=2,
        ),
        Parallelism(
            name="tp",
            library="torch",
            optimizers=_TP_OPTIMIZERS,
            splits=True,
        ),
        Parallelism(
            name="cp",
            library="torch",
            stage=3,
            traced_as=_FSDP2_TRACED_AS,
            optimizers=_FSDP2_OPTIMIZERS,
            splits_sequences=True,
        ),
        Parallelism(
            name="device-map",
            library="torch",
            optimizers=_DEALT_OPTIMIZERS,
            deals_layers=True,
        ),
        Parallelism(
            name="pp",
            library="torch",
            optimizers=_DEALT_OPTIMIZERS,
            deals_layers=True,
            schedules=True,
        ),
        _zero(1, False),
        _zero(1, True),
        _zero(2, False),
        _zero(2, True),
        _zero(3, False),
        _zero(3, True),
    )
}


ZERO3_SUB_GROUP_ELEMENTS = 1_000_000_000
"""Weights that ZeRO 3 updates at a time (deepspeed 0.19.8 runtime/zero/config.py, sub_group_size)."""

ON_ONE_GPU_TOO = tuple(
    row.name for row in PARALLELISMS.values() if row.is_deepspeed and row.offload
)
"""Ways that make sense with one GPU, too: what nobody shares waits in host memory."""
