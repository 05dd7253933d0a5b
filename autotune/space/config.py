"""The user's fixed wishes (Workload) and one complete point of the space (TrainConfig).

Both are values: frozen, complete, comparable and hashable. The tables below give the meaning of each
categorical setting once; every other module asks them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.catalogue.tasks import CAUSAL
from autotune.common.hashed_once import HashedOnce
from autotune.common.json_records import shown
from autotune.space.adapters import ADAPTERS
from autotune.space.checkpoint_plans import INTERVAL
from autotune.space.dataset import Dataset
from autotune.space.headroom import USUAL_HEADROOM, Headroom
from autotune.space.lengths import Filling, Lengths, filling
from autotune.space.media import Media, without_sound
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.teacher import Teacher
from autotune.space.trainers import TRAINERS, row_of

TRADEOFF_CLASSES = ("exact", "numerics", "recipe")
"""Trade-off classes, lowest first: docs/ARCHITECTURE.md, "What fastest means"."""

METHODS = ("full", *ADAPTERS)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Values of torch.compile's `mode`, with Inductor (torch 2.13 torch/__init__.py)."""
COMPILE_BACKENDS = ("inductor", "cudagraphs", "aot_eager")
"""Values of torch.compile's `backend`. aot_eager runs the captured graphs with eager's kernels: no C++
compiler is needed (torch 2.13 torch/_dynamo/backends/)."""

OF_COMPLETIONS = (
    "num_generations",
    "max_completion_length",
    "kl_beta",
    "num_iterations",
    "steps_per_generation",
)
"""Fields of TrainConfig that only trainers which write completions themselves have."""
OF_VLLM = ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")
"""Fields of TrainConfig that say how vLLM writes completions, by their names in TRL's arguments."""
LOADER_SETTINGS = (
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataloader_pin_memory",
)
"""Fields of TrainConfig, by their names in TrainingArguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The training task and its limits, which the search may not change."""

    model: str
    """Model as the user named it: Hub id, catalogue id, folder or config.json."""
    task: str = CAUSAL
    """One of TASK_NAMES."""
    sequence_length: int = 1024
    """Tokens per sample after truncation or packing."""
    effective_batch_size: int = 32
    """Samples per optimizer step: micro-batch x accumulation x GPUs."""
    methods: tuple[str, ...] = METHODS
    """Training methods allowed, of METHODS."""
    memory_budget_bytes: int
    """Bytes that peak_device_bytes may not exceed, on each GPU."""
    num_gpus: int = 1
    """Number of GPUs, alike, in one machine."""
    lengths: Lengths | None = None
    """Lengths of the dataset's samples; None: every sample is as long as the sequence."""
    headroom: Headroom = USUAL_HEADROOM
    """The room that a predicted peak leaves in the budget."""
    host_memory_bytes: int | None = None
    """Bytes of host memory that all GPUs together may take beside the libraries; None: any."""
    pictures: Media | None = None
    """Pictures or sound of each sample, by the name that stored records have; None: there is text alone."""
    teacher: Teacher | None = None
    """The model whose next words are learnt; None for tasks without one."""
    dataset: Dataset | None = None
    """The dataset itself, which exports name; None where there is none. A step does not depend on it."""
    extra_arguments: str = "{}"
    """TrainingArguments that no setting decides, as export.extra_arguments reads them: a JSON object
    that exports carry. A step does not depend on it."""

    def __post_init__(self) -> None:
        if not set(self.methods) <= set(METHODS):
            raise ValueError(f"methods is {shown(self.methods)}")

    @property
    def extra(self) -> dict[str, Any]:
        """The extra arguments by name."""
        values: dict[str, Any] = json.loads(self.extra_arguments)
        return values

    @property
    def sets_loader(self) -> bool:
        """Whether the user has set what a timed loader would."""
        return not self.extra.keys().isdisjoint(LOADER_SETTINGS)

    @property
    def decays(self) -> bool:
        """Whether there is weight decay, which some optimizers need memory for."""
        return bool(self.extra.get("weight_decay"))

    def to_dict(self) -> dict[str, object]:
        """The workload as it is stored and shown.

        It leaves out what there is not (a dataset, pictures, a teacher, several GPUs, a limit of the host),
        the usual headroom, and the dataset's name and the extra arguments, which make no other workload.
        """
        values = dataclasses.asdict(self)
        del values["extra_arguments"], values["dataset"]
        if self.headroom == USUAL_HEADROOM:
            del values["headroom"]
        if self.host_memory_bytes is None:
            del values["host_memory_bytes"]
        if self.lengths is None:
            del values["lengths"]
        if self.pictures is None:
            del values["pictures"]
        else:
            values["pictures"] = without_sound(values["pictures"])
        if self.teacher is None:
            del values["teacher"]
        if self.num_gpus == 1:
            del values["num_gpus"]
        return values

    def filling(self, config: TrainConfig) -> Filling:
        """The micro-batches of an average optimizer step."""
        if self.lengths is None:
            return Filling(num_micro_batches=config.gradient_accumulation_steps)
        found = filling(
            self.lengths,
            config.batching,
            micro_batch_size=config.micro_batch_size * config.rows_per_sample,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            sequence_length=config.sequence_length,
        )
        if not row_of(self.task).writes_down:
            return found
        # There is as much sound with a shorter text, and it takes nearly all of the time.
        useful_share = found.useful_share * found.full_share
        return dataclasses.replace(found, useful_share=useful_share, full_share=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(HashedOnce):
    """One point of the space, complete: an export needs nothing else but the Workload."""

    __hash__ = HashedOnce.__hash__

    method: str
    """One of METHODS."""
    micro_batch_size: int
    """Samples in one forward/backward."""
    gradient_accumulation_steps: int
    """Micro-batches per optimizer step."""
    sequence_length: int
    """Tokens per sample."""
    precision: str
    """A key of PRECISIONS."""
    optimizer: str
    """A key of autotune.space.optimizers.OPTIMIZERS (an `optim` value of TrainingArguments)."""
    update_in_backward: bool = False
    """Whether each weight is updated as soon as its gradient is there, which is then given up: unclipped."""
    activation_checkpointing: int = 0
    """Interval of the checkpointed layers. 0: none; 1: every layer; n: every n-th layer."""
    checkpoint_plan: str = INTERVAL
    """INTERVAL, or a key of CHECKPOINT_PLANS: what cannot say a plan checkpoints every layer."""
    checkpoint_layers: int = 0
    """How many layers are the first ones that a plan tells of; 0 without a plan."""
    activation_offloading: bool = False
    """Whether checkpointed activations wait in host memory."""
    attention: str = "sdpa"
    """Value of Transformers' attn_implementation."""
    lora_rank: int | None = None
    """Rank of a low-rank adapter; None for methods without."""
    lora_targets: str | None = None
    """`all-linear`, `attention`, or module names joined by commas; None for methods without."""
    lora_variant: str = "plain"
    """A key of autotune.space.adapters.LORA_VARIANTS."""
    lora_alpha_ratio: float = 2.0
    """LoRA's alpha over its rank: its output is multiplied by that, in rsLoRA by alpha over the rank's square
    root."""
    lora_dropout: float = 0.0
    """Share of a LoRA layer's input that is dropped."""
    num_virtual_tokens: int | None = None
    """Number of tokens of a prompt, or of tokens that train; None for methods without."""
    peft: str | None = None
    """Fields of a PeftConfig, as autotune.space.adapters.read_peft gives them; None but for method peft."""
    quantization: str = "none"
    """A key of QUANTIZATIONS."""
    quantization_storage: str = "uint8"
    """One of QUANTIZATION_STORAGES."""
    kbit_preparation: bool = False
    """Whether PEFT's prepare_model_for_kbit_training copies what is not quantised to float32."""
    adapter_in_base_dtype: bool = False
    """Whether an adapter stays in the base's 16 bits (PEFT's autocast_adapter_dtype=False)."""
    batching: str = "packed"
    """One of lengths.BATCHINGS."""
    parallelism: str = "none"
    """A key of autotune.space.parallelisms.PARALLELISMS."""
    num_gpus: int = 1
    """GPUs of one machine that share the run."""
    no_sync: bool = False
    """Whether FSDP2 keeps whole gradients between micro-steps, and reduces them once an optimizer step."""
    liger: bool = False
    """Whether Liger's Triton kernels run: norms, rotary embedding, gated MLP, and a loss that makes no
    logits."""
    chunked_loss: bool = False
    """Whether logits and loss are made in parts of each sample, and again in the backward pass."""
    trainer: str = "transformers"
    """A key of TRAINERS."""
    loss_mini_batches: int = 1
    """Mini-batches in which a micro-batch goes through the model, twice, for the loss of all; 1: at once."""
    precompute_ref_log_probs: bool = False
    """Whether the reference scores all samples before training, and is not there in it."""
    num_generations: int | None = None
    """Completions of each prompt, a group; None for trainers that generate nothing."""
    max_completion_length: int | None = None
    """Most tokens of a completion, part of sequence_length; None for trainers that generate nothing."""
    kl_beta: float | None = None
    """Weight of the divergence from a frozen reference, 0: there is none; None for trainers that generate
    nothing."""
    num_iterations: int = 1
    """Number of times that completions are trained on."""
    steps_per_generation: int | None = None
    """Micro-batches that are generated at a time, of which a step's is a multiple; None: all of a step."""
    vllm_gpu_memory_utilization: float = 0.0
    """Share of the card that vLLM takes in the same process to write completions; 0: Transformers writes."""
    vllm_enable_sleep_mode: bool = False
    """Whether vLLM gives its weights and its cache up while what it wrote is trained on."""
    torch_empty_cache_steps: int = 0
    """Interval of the steps that empty the allocator's cache before the backward pass. 0: none; n: every
    n-th."""
    expandable_segments: bool = False
    """Whether segments of torch's allocator grow in place (PYTORCH_ALLOC_CONF): less of them lies idle."""
    neftune_noise_alpha: float = 0.0
    """Strength of the noise added to the embeddings; 0: none."""
    torch_compile: str = "none"
    """`none`, or one of COMPILE_MODES."""
    torch_compile_backend: str = "inductor"
    """One of COMPILE_BACKENDS; the others have no modes but default."""
    dataloader_num_workers: int = 0
    """Processes that load batches; 0: the training process does. Chosen by timing, not searched."""
    dataloader_prefetch_factor: int | None = None
    """Batches that each loading process has ready; None: the Trainer's default."""
    dataloader_pin_memory: bool | None = None
    """Whether batches wait in page-locked memory; None: the Trainer's default."""

    @property
    def has_plan(self) -> bool:
        """Whether layers are checkpointed by a plan, which Trainer has no argument for."""
        return self.checkpoint_plan != INTERVAL

    @property
    def updater(self) -> str:
        """Key of autotune.space.optimizers.UPDATERS: the optimizer, and when it updates."""
        return f"{self.optimizer} in backward" if self.update_in_backward else self.optimizer

    @property
    def is_compiled(self) -> bool:
        return self.torch_compile != "none"

    @property
    def loader_arguments(self) -> dict[str, Any]:
        """TrainingArguments of the loader, without those that are the Trainer's defaults."""
        values = {name: getattr(self, name) for name in LOADER_SETTINGS}
        # No workers are the default, and False, which equals 0, is none.
        return {
            k: v for k, v in values.items() if v is not None and (k, v) != (LOADER_SETTINGS[0], 0)
        }

    @property
    def data_parallel_size(self) -> int:
        """Number of micro-batches that are at work at the same time, each on GPUs of its own."""
        return PARALLELISMS[self.parallelism].data_parallel_size(self.num_gpus)

    @property
    def num_splits(self) -> int:
        """Number of GPUs among which each layer's products are split."""
        return self.num_gpus if PARALLELISMS[self.parallelism].splits else 1

    @property
    def sequence_parts(self) -> int:
        """Number of GPUs among which each sequence is split."""
        return self.num_gpus if PARALLELISMS[self.parallelism].splits_sequences else 1

    @property
    def accumulates_shards(self) -> bool:
        """Whether gradients accumulate under FSDP2, whole or shared out: `no_sync` says which."""
        return PARALLELISMS[self.parallelism].is_fsdp and self.gradient_accumulation_steps > 1

    @property
    def effective_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.data_parallel_size

    @property
    def samples_per_pass(self) -> int:
        """Samples of which the activations are there at the same time, on one device."""
        return self.micro_batch_size // self.loss_mini_batches

    @property
    def compared_samples(self) -> int:
        """Number of samples whose losses depend on each other; 0 where each stands alone."""
        return self.micro_batch_size if TRAINERS[self.trainer].compares_samples else 0

    @property
    def micro_batches_per_generation(self) -> int:
        """Number of micro-batches whose completions are generated at a time."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def generation_batch_size(self) -> int:
        """Completions that are generated at a time on one device."""
        return self.micro_batch_size * self.micro_batches_per_generation

    @property
    def writes_with_vllm(self) -> bool:
        """Whether vLLM writes the completions, in the same process and on the same card."""
        return self.vllm_gpu_memory_utilization > 0

    @property
    def scores_policy(self) -> bool:
        """Whether the policy's log-probabilities of completions are worked out before they are trained on.

        Where vLLM writes, they say how far its own are off. Source: trl 1.16
        GRPOTrainer._generate_and_score_completions.
        """
        generates = TRAINERS[self.trainer].generates
        if generates is None:
            return False
        if self.writes_with_vllm:
            return True
        every = self.micro_batches_per_generation * self.num_iterations
        return generates.scores_always or self.gradient_accumulation_steps % every != 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step on all GPUs together."""
        return self.effective_batch_size * self.rows_per_sample * self.sequence_length

    @property
    def speed_unit(self) -> str:
        """The unit of speed: samples where each is as one token, as a picture is."""
        return "samples/s" if self.sequence_length == 1 else "tokens/s"

    @property
    def rows_per_sample(self) -> int:
        """Rows of a batch for each sample: two for a pair."""
        return TRAINERS[self.trainer].rows_per_sample

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the settings' names, in the order of the fields."""
        return tuple(field.name for field in dataclasses.fields(TrainConfig))

    @staticmethod
    def defaults() -> Mapping[str, Any]:
        """Return the values of the settings that need not be given."""
        return {
            field.name: field.default
            for field in dataclasses.fields(TrainConfig)
            if field.default is not dataclasses.MISSING
        }

    @staticmethod
    def of_values(values: Iterable[Any]) -> TrainConfig:
        """Make one of a value for each field, in order: a third of what a call with names takes."""
        config = object.__new__(TrainConfig)
        for set_value, value in zip(_setters(), values, strict=True):
            set_value(config, value)
        return config


@functools.cache
def _setters() -> tuple[Callable[[TrainConfig, Any], None], ...]:
    """The slots of a TrainConfig, in the order of its fields: what no assignment reaches."""
    return tuple(TrainConfig.__dict__[name].__set__ for name in TrainConfig.names())
