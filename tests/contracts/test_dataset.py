"""A dataset's lengths by a real tokenizer, padding by Transformers' own sampler, and `find --dataset`."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import here
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from autotune.catalogue import installed
from autotune.catalogue.models import resolve as find_model
from autotune.errors import ConfigError
from autotune.records import measurement
from autotune.records.question import Question
from autotune.search.dataset import read_dataset
from autotune.space.dataset import Dataset
from autotune.space.lengths import Lengths, filling
from autotune.worker.build.by_tokens import micro_batches

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
NUM_VARIED = measurement.VARIED_MICRO_BATCHES["cpu"]  # The workers of tests are asked for fewer.
WORDS = [1, 2, 3, 4, 5, 6, 7, 8, 120]
"""Per line: all short but one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    (folder / "tiny").mkdir()
    shutil.copy(EXAMPLE, folder / "tiny" / "config.json")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder / "tiny")
    texts = [" ".join(["word"] * count) for count in WORDS * 40]
    rows = [json.dumps({"text": text, "n": 1}) for text in texts]
    (folder / "data.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "data.txt").write_text("\n\n".join(texts), encoding="utf-8")
    return folder


def read(
    folder: Path, name: str, task: str = "causal-lm", **changes: Any
) -> tuple[Dataset, Lengths]:
    question = Question(dataset=str(folder / name), **changes)
    return read_dataset(question, find_model(str(folder / "tiny")), task, 100)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_samples_are_counted_as_the_tokenizer_cuts_them(folder: Path, name: str) -> None:
    dataset, lengths = read(folder, name)
    assert (dataset.format, dataset.loss_on) == ("text", "all")
    assert (lengths.num_samples, lengths.longest) == (360, 100)
    assert lengths.num_tokens == 40 * (36 + 120)
    assert lengths.num_kept_tokens == 40 * (36 + 100)
    assert lengths.percentiles[50] == 5


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("name", "content", "changes", "part"),
    [
        ("missing.jsonl", None, {}, "There is no such file"),
        ("empty.txt", "\n \n", {}, "It is empty."),
        ("header.csv", "prompt,completion\n", {}, "It is empty."),
        (
            "chat.jsonl",
            '{"messages": [{"role": "user", "content": "word"}]}',
            {},
            "has no chat template",
        ),
        ("chat.jsonl", '{"messages": [{"role": "user", "content": "word"}]}', {}, "--tokenizer ID"),
        (
            "good.txt",
            "word",
            {"tokenizer": "no/such-model"},
            "There is no tokenizer in local files for no/such-model. Fetch it once: python -c "
            "'import transformers; transformers.AutoTokenizer.from_pretrained(\"no/such-model\")'; or ",
        ),
        ("good.txt", "word", {"tokenizer": "no/such-model"}, "--tokenizer names a folder"),
    ],
)
def test_what_cannot_be_read_is_said(
    folder: Path, name: str, content: str | None, changes: dict[str, Any], part: str
) -> None:
    if content is not None:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read(folder, name, **changes)
    assert part in str(error.value)


@pytest.mark.usefixtures("forked_workers")
def test_chats_are_read_for_their_answers_and_refused_without_any(folder: Path) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(folder / "tiny")
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    fast.save_pretrained(folder / "chats")
    source, said = find_model(str(folder / "tiny")), list[str]()
    question = Question(dataset=str(folder / "turns.jsonl"), tokenizer=str(folder / "chats"))
    turns = [{"role": "user", "content": "word"}, {"role": "assistant", "content": "word"}]

    def write(*messages: dict[str, str]) -> None:
        row = {"system": "word", "history": ["word"], "messages": messages}
        (folder / "turns.jsonl").write_text(json.dumps(row), encoding="utf-8")

    write(*turns)
    dataset, lengths = read_dataset(question, source, "causal-lm", 100, note=said.append)
    assert said == [
        "history of the samples: no part of the format chat, so not trained on (--format names another)."
    ]
    # What the system says is a message, too: each is its role and a word.
    assert (dataset.system_field, lengths.longest) == ("system", 3 * 2)
    write(turns[0])
    with pytest.raises(ConfigError, match=r"No sample has an answer. Nothing would be learnt"):
        read_dataset(question, source, "causal-lm", 100)


@pytest.mark.usefixtures("forked_workers")
def test_prompts_that_a_completion_leaves_no_room_for_are_said(folder: Path) -> None:
    rows = [json.dumps({"prompt": " ".join(["word"] * count)}) for count in (8, 9, 20, 20)]
    (folder / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    question = Question(dataset=str(folder / "prompts.jsonl"))
    source, said = find_model(str(folder / "tiny")), list[str]()
    read_dataset(question, source, "grpo", 24, beside=12, note=said.append)
    assert said == [
        "50% of the prompts have more than 12 tokens, and the run leaves them out. The longest has 20, so "
        "give a longer --seq-len."
    ]
    with pytest.raises(ConfigError, match=r"No prompt of .*12 are a completion's.*longest has 20"):
        read_dataset(question, source, "grpo", 19, beside=12)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("family", ["qwen2", "t5"])
def test_a_tokenizer_without_files_is_none(folder: Path, family: str) -> None:
    """Transformers makes one for these families all the same: of special tokens alone."""
    bare = folder / family
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no files of a tokenizer.*--tokenizer names a folder"):
        read(folder, "data.txt", tokenizer=str(bare))


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(2, 8), (8, 2)])
@pytest.mark.parametrize("batching", ["padded", "grouped", "by-tokens"])
def test_padding_is_what_transformers_own_sampler_leaves(
    batching: str, micro_batch: int, accumulation: int
) -> None:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    draw = random.Random(7)
    sizes = [min(1000, int(draw.lognormvariate(5, 1)) + 1) for _ in range(6400)]
    counts = {size: sizes.count(size) for size in set(sizes)}
    lengths = Lengths.of(counts, 1000, num_samples=len(sizes), longest=max(sizes))
    if batching == "grouped":
        generator = torch.Generator().manual_seed(0)
        step = micro_batch * accumulation
        order = list(LengthGroupedSampler(step, lengths=sizes, generator=generator))
    else:
        order = draw.sample(range(len(sizes)), len(sizes))
    batches = [order[i : i + micro_batch] for i in range(0, len(order), micro_batch)]
    if batching == "by-tokens":
        rows = [{"input_ids": [0] * sizes[i], "number": i} for i in order]
        starts = range(0, len(rows), micro_batch * accumulation)
        steps = [rows[i : i + micro_batch * accumulation] for i in starts]
        made = [micro_batches(list, micro_batch * 1000, step)["micro_batches"] for step in steps]
        batches = [[row["number"] for row in batch] for step in made for batch in step]
        assert max(len(step) for step in made) <= accumulation
    padded = sum(max(sizes[i] for i in batch) * len(batch) for batch in batches)
    assert filling(
        lengths,
        batching,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        sequence_length=1000,
    ).useful_share == pytest.approx(sum(sizes) / padded, rel=0.02)


def find(
    folder: Path,
    *more: str,
    batchings: str = "packed, padded, grouped",
    attentions: str = "eager",
) -> dict[str, Any]:
    space = folder / "space.yaml"
    space.write_text(
        "methods:\n  full:\n    micro_batch_size: [1, 2, 8]\n    precision: [bf16-true]\n"
        f"    optimizer: [adamw_torch_fused]\n    attention: [{attentions}]\n"
        f"    batching: [{batchings}]\n",
        encoding="utf-8",
    )
    arguments = [
        *("find", "--model", str(folder / "tiny"), "--dataset", str(folder / "data.jsonl")),
        *("--space", "space.yaml", "--method", "full", "--effective-batch", "8"),
        *("--allow", "recipe", "--seq-len", "200", "--json"),
        *more,
    ]
    ran = here.command(*arguments, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.usefixtures("forked_workers")
def test_find_counts_no_padding_and_takes_the_longest_sample_for_the_worst(folder: Path) -> None:
    asked = ("--gpu", "rtx-4070")
    padded = find(folder, *asked, batchings="padded, grouped")
    assert padded["workload"]["sequence_length"] == 120
    assert padded["counts"]["enumerated"] == 6
    found = find(folder, *asked)
    # A block of a stream may be longer than any sample.
    assert found["workload"]["sequence_length"] == 200
    assert found["workload"]["lengths"]["num_samples"] == 360
    # One sample of nine is thirty times as long: what is padded to it is mostly padding.
    assert found["best"]["useful_share"] > 0.9
    assert found["counts"]["enumerated"] == 9


@pytest.mark.usefixtures("forked_workers")
def test_max_takes_lengths_and_format_from_the_dataset(folder: Path) -> None:
    (folder / "space.yaml").write_text(
        "methods:\n  full:\n    micro_batch_size: [1]\n    precision: [bf16-true]\n"
        "    optimizer: [adamw_torch_fused]\n    attention: [eager]\n    batching: [padded]\n",
        encoding="utf-8",
    )
    arguments = [
        *("max", "--what", "micro-batch", "--model", str(folder / "tiny"), "--gpu", "rtx-4070"),
        *("--dataset", str(folder / "data.jsonl"), "--format", "text", "--gpu-mem", "1GB"),
        *("--space", "space.yaml", "--method", "full", "--seq-len", "200", "--json"),
    ]
    ran = here.command(*arguments, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["best"]["config"]["sequence_length"] == 120
    assert found["best"]["config"]["batching"] == "padded"
    assert found["best"]["useful_share"] < 0.5
    _, *check = shlex.split(found["check"])
    ran = here.command(*check, "--json", cwd=folder)
    checked = json.loads(ran.stdout)
    assert checked["peak_device_bytes"] == found["best"]["peak_device_bytes"]
    assert checked["useful_share"] == pytest.approx(found["best"]["useful_share"])
    assert "the dataset is read" not in ran.stderr
    assert "the dataset is read" in here.command(*check, cwd=folder).stderr

    refused = here.command("max", "--what", "model", *arguments[5:-1], cwd=folder)
    assert refused.returncode == 2
    assert "--dataset does not go with --what model" in refused.stderr


@pytest.mark.usefixtures("forked_workers")
def test_what_needs_no_padding_wins_where_flash_attention_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of 1 to 8 tokens beside one of 120: in batches of eight most places are padding."""
    note = folder / "site" / "flash_attn-2.8.3.dist-info"
    note.mkdir(parents=True)
    (note / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(folder / "site")
    # As a new process would look, which remembers nothing.
    monkeypatch.setattr(installed, "version", installed.version.__wrapped__)
    asked = ("--gpu", "rtx-4070", "--out", "free")
    found = find(
        folder,
        *asked,
        batchings="padded, padding-free",
        attentions="sdpa, flash_attention_2",
    )
    best = found["best"]
    assert best["config"]["batching"] == "padding-free"
    assert best["config"]["attention"] == "flash_attention_2"
    # Nothing is padding, but launching kernels for a few tokens takes nearly as long as for many.
    assert 0.1 < best["useful_share"] < 0.5
    assert found["invalid_by_rule"] == {"padding-free-needs-flash-attention": 3}
    # The worst batch is one of the longest samples, as with padding.
    assert found["workload"]["sequence_length"] == 120
    assert "'batching': 'padding-free'" in (folder / "free" / "train.py").read_text()


@pytest.mark.usefixtures("forked_workers")
def test_a_measured_answer_counts_no_padding_either(folder: Path) -> None:
    found = find(
        folder,
        *("--backend", "cpu", "--gpu-mem", "200MB"),
        *("--effort", "quick", "--confirm-steps", "1"),
    )
    best = found["measured"]["best"]
    config = best["config"]
    tokens = config["micro_batch_size"] * config["gradient_accumulation_steps"] * 200
    step_seconds = (
        config["gradient_accumulation_steps"] * best["micro_step_seconds"]
        + best["optimizer_step_seconds"]
    )
    assert best["tokens_per_second"] == pytest.approx(
        best["useful_share"] * tokens / step_seconds, rel=1e-6
    )


@pytest.mark.usefixtures("forked_workers")
def test_padded_batches_are_confirmed_with_the_datasets_lengths(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(measurement.VARIED_MICRO_BATCHES, "cpu", NUM_VARIED)
    found = find(
        folder,
        *("--backend", "cpu", "--gpu-mem", "200MB"),
        *("--effort", "quick", "--confirm-steps", "1"),
        batchings="padded",
    )
    assert found["measured"]["confirmed"]
    confirmation = found["measured"]["confirmation"]
    assert confirmation["config"]["batching"] == "padded"
    assert confirmation["spec"]["lengths"] == found["workload"]["lengths"]["percentiles"]
    # 10 micro-batches on a CPU at least, and 4 steps.
    accumulation = confirmation["config"]["gradient_accumulation_steps"]
    assert confirmation["num_varied_steps"] == max(-(-10 // accumulation), 4)
    # Speed is that of the one step at full length, and memory is not counted beyond it.
    assert confirmation["num_steps"] == 1
    assert confirmation["varied_device_bytes"] is None
