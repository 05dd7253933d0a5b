"""inputs.py, and what models.py says of task and length: pieces that must go together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import answers
import pytest
from fake_nvml import fake_nvml

from autotune.catalogue import gpus, host_memory, nvml
from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.catalogue.models import ModelSource, resolve
from autotune.catalogue.tasks import CAUSAL, SPEECH
from autotune.common.units import GIB, MIB, parse_bytes
from autotune.errors import ConfigError, HardwareError
from autotune.records.question import Question
from autotune.search import budget
from autotune.search.budget import CardSource, ChosenCard
from autotune.search.sounds import read_sound
from autotune.space.headroom import NO_HEADROOM, USUAL_HEADROOM, Headroom
from autotune.space.lengths import Lengths


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """The cards of this machine: none, unless a test adds some."""
    cards: list[Gpu] = []
    monkeypatch.setattr("autotune.catalogue.gpus.detect", lambda: cards)
    return cards


def found(card: Gpu, budget_bytes: int) -> ChosenCard:
    return ChosenCard(gpu=card, source=CardSource.FOUND, budget_bytes=budget_bytes)


def test_a_named_card_lends_its_whole_memory(here: list[Gpu]) -> None:
    here.append(find_gpu("t4"))
    chosen = budget.choose_card("rtx-4070", None)
    card, reason, budget_bytes = chosen.gpu, chosen.why, chosen.budget_bytes
    assert (card.name, reason) == ("NVIDIA RTX 4070", "named")
    assert budget_bytes == card.capacity_bytes


def test_a_size_is_taken_to_the_byte(here: list[Gpu]) -> None:
    assert budget.choose_card("rtx-4090", "12GB").budget_bytes == 12_000_000_000
    assert budget.choose_card("rtx-4090", "11.5GiB").budget_bytes == 11.5 * GIB


def test_more_than_the_named_card_has_is_refused(here: list[Gpu]) -> None:
    with pytest.raises(
        ConfigError, match=r"24GB \(22\.35 GiB\) is more than the NVIDIA RTX 4070"
    ) as e:
        budget.choose_card("rtx-4070", "24GB")
    assert "11.49 GiB" in e.value.why


def test_a_card_that_is_here_is_taken(here: list[Gpu]) -> None:
    small, large = find_gpu("t4"), find_gpu("a100-sxm4-80gb")
    here += [small, large]
    assert budget.choose_card(None, None) == found(small, small.capacity_bytes)
    assert budget.choose_card(None, "40GB") == found(large, 40_000_000_000)


def test_without_a_card_one_is_planned_for(here: list[Gpu]) -> None:
    chosen = budget.choose_card(None, "12GB")
    card, reason, budget_bytes = chosen.gpu, chosen.why, chosen.budget_bytes
    assert card.name == "NVIDIA RTX 4070"
    assert "no CUDA GPU is here" in reason
    assert budget_bytes == 12_000_000_000
    here.append(find_gpu("t4"))
    assert "the GPU here has less" in budget.choose_card(None, "40GB").why


def test_in_wsl_paged_state_stays_on_the_card(
    here: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not budget.choose_card("t4", None).gpu.in_wsl
    monkeypatch.setattr(host_memory, "in_wsl", lambda: True)
    for name, size in (("t4", None), (None, "12GB")):
        chosen = budget.choose_card(name, size)
        assert chosen.gpu.in_wsl
        assert chosen.why.endswith("; in WSL 2, where paged state stays on the card")
    here.append(find_gpu("t4"))
    assert budget.CHOOSERS["cuda"](None, None).gpu.in_wsl


def test_without_card_and_size_there_is_no_budget(here: list[Gpu]) -> None:
    with pytest.raises(ConfigError, match="no memory budget"):
        budget.choose_card(None, None)


def test_a_card_without_cuda_is_refused() -> None:
    with pytest.raises(HardwareError, match="does not run CUDA"):
        budget.choose_card("mi300x", None)


def test_the_base_fills_in_what_was_left_out() -> None:
    assert budget.agreed("--seq-len", None, 512) == 512
    assert budget.agreed("--seq-len", 512, 512) == 512
    with pytest.raises(ConfigError, match="--seq-len is 1024, and the base has 512"):
        budget.agreed("--seq-len", 1024, 512)


def source(**config: Any) -> ModelSource:
    return ModelSource(name="m", config=config, origin="file", path=Path("m"))


def test_the_shortest_sample_has_a_next_token() -> None:
    with pytest.raises(ConfigError, match="one token"):
        budget.check_length("causal-lm", 1)
    budget.check_length("causal-lm", 2)
    budget.check_length("masked-lm", 1)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "llama", "max_position_embeddings": 2048}, None),
        ({"model_type": "t5", "n_positions": 512}, None),
        ({"model_type": "bart", "max_position_embeddings": 1024}, 1024),
        ({"model_type": "deberta-v2", "max_position_embeddings": 512}, 512),
        (
            {
                "model_type": "deberta-v2",
                "max_position_embeddings": 512,
                "position_biased_input": False,
            },
            None,
        ),
        ({"model_type": "bert"}, None),
        ({"model_type": "bert", "max_position_embeddings": "many"}, None),
    ],
)
def test_learned_positions_end_somewhere(config: dict[str, Any], limit: int | None) -> None:
    model = source(**config)
    assert model.max_sequence_length == limit
    made_for = limit or model.positions or 100_000
    assert budget.possible_length(model, 100_000, is_given=False) == made_for
    if limit is not None:
        assert budget.possible_length(model, limit, is_given=True) == limit
        with pytest.raises(ConfigError, match="too long"):
            budget.possible_length(model, limit + 1, is_given=True)


def test_a_length_that_nobody_gave_is_one_that_the_model_is_made_for() -> None:
    rotary = source(model_type="llama", max_position_embeddings=512)
    assert budget.possible_length(rotary, 1024, is_given=False) == 512
    assert budget.possible_length(rotary, 1024, is_given=True) == 1024


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "causal-lm"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "masked-lm"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "masked-lm"),
        ({"model_type": "roberta"}, "masked-lm"),
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
            "sequence-classification",
        ),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "seq2seq-lm"),
        ({"model_type": "marian", "is_encoder_decoder": True}, "seq2seq-lm"),
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            "automatic-speech-recognition",
        ),
        (
            {"model_type": "whisper", "architectures": ["WhisperForAudioClassification"]},
            "audio-classification",
        ),
        # Its class is named as one of texts.
        (
            {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForSequenceClassification"]},
            "audio-classification",
        ),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, "ctc"),
        ({"model_type": "bert", "is_decoder": True}, "causal-lm"),
        ({"model_type": "bart", "is_encoder_decoder": False}, "causal-lm"),
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
            "causal-lm",
        ),
        ({"model_type": "llama", "architectures": []}, "causal-lm"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "causal-lm"),
    ],
)
def test_the_task_follows_from_the_architecture(config: dict[str, Any], task: str) -> None:
    assert source(**config).task == task


@pytest.mark.parametrize("task", ["causal-lm", "kto", "dpo"])
def test_only_what_writes_is_trained_to_foretell_the_next_word(task: str) -> None:
    for config in (
        {"model_type": "llama"},
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "bart", "is_encoder_decoder": False},
    ):
        budget.for_task(source(**config), task)
    for model_type, reason in (("bert", "reads both ways"), ("bart", "decoder alone")):
        model = source(model_type=model_type)
        budget.for_task(model, model.task)
        budget.for_task(model, "reward")
        with pytest.raises(ConfigError, match=reason):
            budget.for_task(model, task)


@pytest.mark.parametrize(
    ("model_type", "task", "others"),
    [
        (
            "moonshine",
            "automatic-speech-recognition",
            "type whisper are, and it is of the type moonshine",
        ),
        ("bert", "audio-classification", "wavlm, whisper are, .* type bert. Give --task masked-lm"),
        ("llama", "audio-classification", "is of the type llama. Give --task causal-lm, seq"),
        ("llama", "image-classification", "no AutoModelForImageClassification .* --task causal-lm"),
        ("llama", "seq2seq-lm", "no AutoModelForSeq2SeqLM of the type llama"),
        ("gpt-sw3", "masked-lm", "Give --task causal-lm, sequence"),
        ("vit", "causal-lm", "no AutoModelForCausalLM .* Give --task image-classification.$"),
        ("whisper", "seq2seq-lm", "Give --task automatic-speech-recognition or audio-class"),
        ("wav2vec2", "dpo", "Give --task audio-classification or ctc"),
        ("llava", "causal-lm", "--task image-text-to-text with a --dataset .* or say which ones"),
        ("internvl", "causal-lm", "Name another model: none of the tasks here"),
        ("sam", "masked-lm", "Name another model: none of the tasks here"),
        ("funnel", "kto", "Give --task masked-lm, sequence"),
    ],
)
def test_a_task_of_some_types_is_for_those(model_type: str, task: str, others: str) -> None:
    with pytest.raises(ConfigError, match=others):
        budget.for_task(source(model_type=model_type), task)


def test_endless_layers_are_a_slip(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": 10000000}', encoding="utf-8")
    with pytest.raises(ConfigError, match="10,000,000 layers"):
        resolve(str(path))


def test_every_broken_rule_is_told_with_its_reason() -> None:
    config = dataclasses.replace(answers.CONFIG, quantization="nf4", activation_checkpointing=30)
    model = source(model_type="llama", num_hidden_layers=28)
    with pytest.raises(ConfigError, match="This configuration cannot work") as error:
        budget.check_rules(
            config, answers.WORKLOAD, find_gpu("t4"), model, what="This configuration"
        )
    for name in ("quantization-needs-qlora", "checkpoint-interval-within-layers", "bf16-needs-"):
        assert name in str(error.value)
    assert "cannot work: quantised weights cannot be trained" in str(error.value)
    fine = dataclasses.replace(answers.CONFIG, activation_checkpointing=28)
    budget.check_rules(fine, answers.WORKLOAD, find_gpu("rtx-4070"), model, what="This one")


def test_the_cpu_as_a_card_needs_a_budget_and_no_card() -> None:
    chosen = budget.cpu_as_card(None, "500MB")
    card, reason, budget_bytes = chosen.gpu, chosen.why, chosen.budget_bytes
    assert (card.name, reason, budget_bytes) == ("CPU", CardSource.CPU.value, 500 * 10**6)
    for name, size, part in (
        (None, None, "no memory budget"),
        ("t4", "1GB", "--gpu does not go"),
        (None, "900TB", "more than half"),
    ):
        with pytest.raises(ConfigError, match=part):
            budget.cpu_as_card(name, size)


def test_probes_on_cuda_need_the_card_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "detect", list)
    for size in (None, "12GB"):
        with pytest.raises(HardwareError, match="needs a CUDA GPU"):
            budget.card_here(None, size)
    here = gpus.find_gpu("rtx-4090")
    monkeypatch.setattr(gpus, "detect", lambda: [here])
    assert budget.card_here(None, "12GB") == found(here, 12 * 10**9)
    assert budget.card_here("4090", None) == found(here, here.capacity_bytes)
    # A budget of all of the card is still of the card that is here; more is planned for.
    for size in (None, f"{here.capacity_bytes}B"):
        assert budget.card_here_or_planned(None, size) == budget.card_here(None, size)
    planned = budget.card_here_or_planned(None, f"{here.capacity_bytes + 1}B")
    assert "less than the budget" in planned.note
    with pytest.raises(HardwareError, match="more than the card has"):
        budget.card_here(None, "80GB")
    with pytest.raises(ConfigError, match="not the card of this machine"):
        budget.card_here("t4", None)


def card_that_others_use(monkeypatch: pytest.MonkeyPatch, used_bytes: int) -> None:
    """12 GiB, of which the driver keeps 250 MiB."""
    fake_nvml(
        monkeypatch,
        ["NVIDIA GeForce RTX 4070"],
        used_bytes=used_bytes,
        compute=[(4711, used_bytes)],
        programs={4711: "/usr/bin/python3"},
    )


def test_what_others_hold_is_no_part_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    card_that_others_use(monkeypatch, 3 * GIB)
    chosen = budget.card_here(None, None)
    card, reason, budget_bytes = chosen.gpu, chosen.why, chosen.budget_bytes
    assert card.name == "NVIDIA RTX 4070"
    # 12288 - 250 - 3072 = 8966 MiB are free: 35 times 256 MiB.
    assert budget_bytes == 35 * 256 * MIB
    assert reason == (
        "found here; 8.76 GiB of its 11.76 GiB are free, so the budget is 8.75 GiB: 3.00 GiB are "
        "held by python3 (process 4711, 3.00 GiB)"
    )


def test_a_budget_that_is_free_is_taken_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    card_that_others_use(monkeypatch, 3 * GIB)
    chosen = budget.card_here(None, "8GB")
    assert (chosen.why, chosen.budget_bytes) == ("found here", 8 * 10**9)


@pytest.mark.parametrize(
    ("size", "used_bytes", "parts"),
    [
        ("11GB", 3 * GIB, ("--gpu-mem 11GB is not free", "8.76 GiB of its 11.76 GiB are free")),
        (None, 12000 * MIB, ("too little free memory", "38.0 MiB of its")),
    ],
)
def test_a_budget_that_is_not_free_is_refused(
    monkeypatch: pytest.MonkeyPatch, size: str | None, used_bytes: int, parts: tuple[str, ...]
) -> None:
    card_that_others_use(monkeypatch, used_bytes)
    with pytest.raises(HardwareError) as raised:
        budget.card_here(None, size)
    for part in (*parts, "python3 (process 4711", "End what holds it"):
        assert part in str(raised.value)


def test_a_card_that_nobody_uses_is_lent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    card_that_others_use(monkeypatch, 5 * MIB)
    chosen = budget.card_here(None, None)
    card, reason, budget_bytes = chosen.gpu, chosen.why, chosen.budget_bytes
    assert (reason, budget_bytes) == ("found here", card.capacity_bytes)
    assert budget.card_here(None, "12GB").budget_bytes == 12 * 10**9


def test_probes_run_on_the_first_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much room the second has."""
    small, large = gpus.find_gpu("t4"), gpus.find_gpu("a100-sxm4-80gb")
    monkeypatch.setattr(gpus, "detect", lambda: [small, large])
    with pytest.raises(HardwareError, match="more than the card has"):
        budget.card_here(None, "40GB")


def test_without_a_driver_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [], error="Driver Not Loaded")
    with pytest.raises(HardwareError, match="driver is installed, and not loaded"):
        budget.card_here(None, None)


def test_by_default_the_card_that_probes_run_on_is_taken_where_it_has_as_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card_that_others_use(monkeypatch, 3 * GIB)
    choose = budget.CHOOSERS["auto"]
    chosen = choose(None, None)
    reason, budget_bytes = chosen.why, chosen.budget_bytes
    assert reason.startswith("found here; 8.76 GiB of its")
    assert budget_bytes == 35 * 256 * MIB
    with pytest.raises(HardwareError, match="--backend predict"):
        choose(None, "11GB")
    # Planned for: named, too large for it, or on a card that no probe would see.
    assert choose("rtx-4090", None).source is CardSource.NAMED
    (tmp_path / "card.toml").write_text('like = "rtx-3090"\nbetween_gpus_gb_per_second = 12\n')
    named = str(tmp_path / "card.toml")
    assert choose(named, None).why == f"as a file says: {named}"
    assert choose(None, "40GB").why.startswith("planned for: the GPU here has less")
    small, large = gpus.find_gpu("t4"), gpus.find_gpu("a100-sxm4-80gb")
    monkeypatch.setattr(gpus, "detect", lambda: [small, large])
    chosen = choose(None, "40GB")
    card, reason = chosen.gpu, chosen.why
    assert card == large
    assert "does not put it first" in reason
    monkeypatch.setattr(gpus, "detect", list)
    assert choose(None, "12GB").why.endswith("no CUDA GPU is here (--gpu names another)")
    assert choose(None, "12GiB").why.endswith(
        "; of its memory 11.49 GiB can be used, less than the budget: --gpu rtx-4070 plans for that"
    )


def test_an_effective_batch_is_shared_evenly_or_the_next_larger_is_named() -> None:
    assert [budget.shared_batch(size, 4, CAUSAL) for size in (4, 32)] == [4, 32]
    assert budget.shared_batch(8, 4, "kto") == 8
    for size, named, task in (
        (30, 32, CAUSAL),
        (1, 4, CAUSAL),
        (33, 36, "kto"),
        # Groups of eight completions are whole.
        (33, 40, "grpo"),
        # Each GPU compares two.
        (4, 8, "kto"),
        (4, 8, "sentence-similarity"),
    ):
        with pytest.raises(ConfigError, match=f"Give --effective-batch {named}\\b"):
            budget.shared_batch(size, 4, task)
    with pytest.raises(
        ConfigError, match=r"of 1 is too small for KTOTrainer\. .* needs 2 at least\."
    ):
        budget.shared_batch(1, 1, "kto")


def test_probes_of_a_shared_run_need_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "alike", lambda: ["0"])
    card = budget.cpu_as_card(None, "1GB")
    budget.check_shared_probes("cuda", 1, card)
    budget.check_shared_probes("predict", 2, card)
    budget.check_shared_probes("cpu", 2, card)
    with pytest.raises(HardwareError, match="Probes of a run on 2 GPUs need as many of one kind"):
        budget.check_shared_probes("cuda", 2, card)
    half_bytes = card.gpu.capacity_bytes // 2
    much = dataclasses.replace(card, budget_bytes=half_bytes)
    with pytest.raises(ConfigError, match=r"2 processes with .* need more than half"):
        budget.check_shared_probes("cpu", 2, much)
    in_cluster = dataclasses.replace(card, source=CardSource.CLUSTER)
    budget.check_shared_probes("cuda", 2, in_cluster)
    # Whatever the probes would run on, only those of a CPU share its memory.
    budget.check_shared_probes("auto", 2, much)
    budget.check_shared_probes("predict", 2, much)
    budget.check_shared_probes(
        "cpu", 2, dataclasses.replace(card, budget_bytes=card.gpu.capacity_bytes // 4)
    )


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, USUAL_HEADROOM),
        ({"odds": 0.5}, Headroom(odds=0.5)),
        ({"headroom": "0"}, NO_HEADROOM),
        ({"headroom": " 0 "}, NO_HEADROOM),
        ({"headroom": "1GB"}, Headroom(spare_bytes=10**9)),
        ({"headroom": "1GB", "odds": 0.5}, "--odds and --headroom do not go together"),
        ({"headroom": "2GB"}, "--headroom 2GB leaves nothing of the budget"),
        ({"headroom": "3GB"}, "--headroom 3GB leaves nothing of the budget"),
    ],
)
def test_the_room_that_is_asked_for(asked: dict[str, Any], found: Headroom | str) -> None:
    question = Question(**asked)
    if isinstance(found, Headroom):
        assert budget.headroom_of(question, 2 * 10**9) == found
        return
    with pytest.raises(ConfigError, match=found):
        budget.headroom_of(question, 2 * 10**9)
    if "leaves" in found:  # Nothing is refused of a card that is not chosen yet.
        assert budget.headroom_of(question, None).spare_bytes == parse_bytes(asked["headroom"])


def test_the_host_memory_that_is_allowed() -> None:
    assert budget.host_memory_of(Question()) is None
    assert budget.host_memory_of(Question(host_mem=" 0")) == 0
    assert budget.host_memory_of(Question(host_mem="64GB")) == 64 * 10**9


def test_what_the_base_says_is_agreed_with() -> None:
    assert budget.agreed("--seq-len", None, 8) == budget.agreed("--seq-len", 8, 8) == 8
    for other in (7, 9):
        with pytest.raises(ConfigError, match=f"--seq-len is {other}, and the base has 8"):
            budget.agreed("--seq-len", other, 8)


def test_a_sample_that_is_a_picture_or_a_sound_has_no_length() -> None:
    assert budget.has_lengths("causal-lm", None)
    assert budget.has_lengths("causal-lm", 8)
    assert not budget.has_lengths("image-classification", None)
    with pytest.raises(ConfigError, match="--seq-len does not go with --task image-class"):
        budget.has_lengths("image-classification", 8)
    with pytest.raises(
        ConfigError, match="--seq-len does not go with --task audio-class"
    ) as refused:
        budget.has_lengths("audio-classification", 8)
    assert "--audio-seconds says how long it is" in str(refused.value.why)


@pytest.mark.parametrize(
    ("kind", "task"), [("hubert", "ctc"), ("whisper", SPEECH), ("bert", SPEECH)]
)
def test_what_is_said_is_written_down_by_a_decoder_or_moment_by_moment(
    kind: str, task: str
) -> None:
    assert source(model_type=kind).own_task(SPEECH) == task


def test_ctc_finds_room_for_as_many_tokens_as_there_are_moments() -> None:
    said: list[str] = []
    model = source(model_type="wav2vec2")

    def length(task: str, number: int, **given: Any) -> int:
        asked = Question(audio_seconds=1, **given)
        seen = read_sound(asked, model, "ctc")
        return budget.length_of_texts(asked, model, seen, task, number, said.append)

    assert length("ctc", 48) == 48
    assert length(SPEECH, 50) == 50
    assert said == []
    assert length("ctc", 1024) == length("ctc", 1024, dataset="x") == 49
    assert len(said) == 1
    assert "texts are taken to have 49 tokens" in said[0]
    with pytest.raises(ConfigError, match="A text of 50 tokens is too long for 1 s of sound"):
        length("ctc", 50, seq_len=50)


def test_the_longest_sample_is_the_worst_batch_unless_samples_are_packed() -> None:
    notes: list[str] = []
    lengths = Lengths.of({5: 2, 9: 1}, 16, num_samples=3, longest=9)
    assert budget.longest_batch(lengths, 16, packs=True, note=notes.append) == 16
    assert budget.longest_batch(lengths, 9, packs=False, note=notes.append) == 9
    assert notes == []
    assert budget.longest_batch(lengths, 16, packs=False, note=notes.append) == 9
    assert notes == ["no sample has more than 9 tokens: that is the sequence length."]


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("stored", "methods", "kept", "said"),
    [
        (None, ("full", "qlora"), ("full", "qlora"), ""),
        # An adapter over packed weights is QLoRA; other adapters go over them, too.
        (NF4, ("full", "lora", "qlora", "ia3"), ("qlora", "ia3"), ""),
        (NF4, ("full", "lora"), (), "by full or lora. Its checkpoint is stored in nf4, and an ada"),
        (NF4, ("full",), (), "Give --method qlora, or name the model that it was made from"),
        # What is unpacked into 16 bits is not packed again.
        ({"quant_method": "mxfp4"}, ("full", "lora", "qlora"), ("full", "lora"), ""),
        (
            {"quant_method": "fp8"},
            ("qlora",),
            (),
            "quantised already, and FineGrainedFP8Config can only unpack it into 16 bits. Give --met",
        ),
        ({"quant_method": "fp8"}, ("qlora",), (), "Give --method lora, or name the model"),
    ],
)
def test_which_methods_train_a_quantised_checkpoint(
    stored: dict[str, Any] | None, methods: tuple[str, ...], kept: tuple[str, ...], said: str
) -> None:
    more = {} if stored is None else {"quantization_config": stored}
    model = source(model_type="llama", **more)
    if kept:
        assert budget.methods_for(model, methods) == kept
        return
    with pytest.raises(ConfigError) as refused:
        budget.methods_for(model, methods)
    assert said in str(refused.value)


def test_the_cache_of_a_generation_is_of_a_micro_batch_unless_others_are_asked_for() -> None:
    model = source(
        model_type="llama",
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        max_position_embeddings=64,
    )
    config = dataclasses.replace(answers.CONFIG, micro_batch_size=5, sequence_length=16)
    per_token = 2 * 3 * 2 * 8 * 2
    for batch, context, tokens in ((None, None, 5 * 16), (2, None, 2 * 16), (None, 10, 5 * 10)):
        cache = budget.generation(model, config, batch_size=batch, context=context)
        assert cache.total_bytes == tokens * per_token
    exact = dataclasses.replace(config, precision="fp32")
    assert budget.generation(model, exact, batch_size=1, context=1).total_bytes == 2 * per_token


def test_a_file_of_an_option_is_yaml(tmp_path: Path) -> None:
    path = tmp_path / "peft.yaml"
    for text, value in (
        ("peft_type: OFT\nr: 8\n", {"peft_type": "OFT", "r": 8}),
        ("[1, 2]", [1, 2]),
    ):
        path.write_text(text)
        assert budget.read_yaml(path) == value
    for text in ("a: [1", "a: 1\na: 2\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"peft\.yaml is not YAML"):
            budget.read_yaml(path)
