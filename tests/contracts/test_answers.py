"""Labels on answers alone, by real chat templates: TRL keeps copies of them, some with the answers marked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast
from trl import DatasetMixtureConfig

from autotune.export import trl_config
from autotune.export.encode import ALPACA, IGNORED, encode
from autotune.export.samples.formats import Columns
from autotune.export.samples.read import Samples, read_samples
from autotune.export.samples.rows import Sample
from autotune.export.samples.values import UnusableData
from autotune.space.config import TrainConfig, Workload
from autotune.space.dataset import Dataset

pytestmark = pytest.mark.worker

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CHAT = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "It is one."},
    {"role": "user", "content": "And é then?"},
    {"role": "assistant", "content": "Two, é."},
]
ANSWERS = [message["content"] for message in CHAT[1::2]]


def make_tokenizer(template: str | None = None) -> Any:
    """A tokenizer with a token per byte, and one for all that looks special in the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<b>", eos_token="<e>")
    made.chat_template = template
    if template is not None:
        text = made.apply_chat_template(CHAT, tokenize=False)
        found = sorted(set(re.findall(r"<[^<>\s]+>", text)))
        made.add_special_tokens({"additional_special_tokens": found})
    return made


def chat_of(messages: list[dict[str, Any]], **more: Any) -> Samples:
    return Samples("chat", [Sample(messages=messages, **more)])


def learnt(tokenizer: Any, ids: list[int], labels: list[Any]) -> list[str]:
    """The texts whose tokens have labels, apart where others lie between them."""
    runs: list[list[int]] = [[]]
    for token, label in zip(ids, labels, strict=True):
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]


def learnt_of(tokenizer: Any, data: Samples, loss_on: str = "answers") -> list[str]:
    ((ids, labels),) = encode(data, tokenizer, loss_on)
    return learnt(tokenizer, ids, labels)


MARKED = sorted(
    path.name.removesuffix("_training.jinja")
    for path in TEMPLATES.glob("*_training.jinja")
    # Those of models of images take a list of parts only.
    if not path.name.startswith(("idefics", "llava", "smolvlm"))
)
# Templates that leave out an empty thought before the last turn, which TRL's marked ones keep.
FORGETS = ("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6")


@pytest.mark.parametrize("name", MARKED)
def test_the_answers_are_those_that_trl_marks(name: str) -> None:
    """What a model is given before it answers is none of it; TRL counts some of that as well."""
    tokenizer = make_tokenizer((TEMPLATES / f"{name}.jinja").read_text())
    mine = learnt_of(tokenizer, chat_of(CHAT))
    marked = tokenizer.apply_chat_template(
        CHAT,
        chat_template=(TEMPLATES / f"{name}_training.jinja").read_text(),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    masks = [0 if mask else IGNORED for mask in marked["assistant_masks"]]
    theirs = learnt(tokenizer, marked["input_ids"], masks)
    assert len(mine) == len(theirs) == 2
    assert all(answer in text for answer, text in zip(ANSWERS, mine, strict=True))
    if name == "glm4moe":  # A turn ends where the next begins: TRL writes one more at the end.
        theirs = [text.removesuffix("<|user|>") for text in theirs]
    if name == "gptoss":  # Only a last turn ends with the token that ends an answer.
        theirs[0] = theirs[0].removesuffix("<|end|>")
    assert [text.endswith(own) for text, own in zip(theirs, mine, strict=True)] == [True, True]


@pytest.mark.parametrize("name", [*FORGETS, "llama3_2", "gemma4", "lfm2_2_5"])
def test_the_last_answer_is_what_a_model_adds_to_its_prompt(name: str) -> None:
    tokenizer = make_tokenizer((TEMPLATES / f"{name}.jinja").read_text())
    prompt = tokenizer.apply_chat_template(CHAT[:3], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert whole.startswith(prompt)
    assert learnt_of(tokenizer, chat_of(CHAT))[-1] == whole.removeprefix(prompt)


def test_marks_in_a_template_are_taken_as_they_are() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}A {% generation %}{{ m['content'] }}"
        "{% endgeneration %}<e>{% else %}U {{ m['content'] }}{% endif %}{% endfor %}"
    )
    assert learnt_of(make_tokenizer(template), chat_of(CHAT)) == ANSWERS


QWEN = (TEMPLATES / "qwen2_5.jinja").read_text()


def test_the_messages_of_a_prompt_are_not_learnt() -> None:
    found = learnt_of(make_tokenizer(QWEN), chat_of(CHAT, num_given=3))
    assert found == ["Two, é.<|im_end|>\n"]


def test_all_is_learnt_where_that_is_asked_for() -> None:
    tokenizer = make_tokenizer(QWEN)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert learnt_of(tokenizer, chat_of(CHAT), "all") == [whole]


def test_pairs_and_texts_end_with_the_token_that_ends_a_text() -> None:
    tokenizer = make_tokenizer()
    pair = Samples("prompt-completion", [Sample(text="a b ", answer="c é")])
    assert learnt_of(tokenizer, pair) == ["c é<e>"]
    assert learnt_of(tokenizer, pair, "all") == ["a b c é<e>"]
    assert learnt_of(tokenizer, Samples("text", [Sample(text="a b")]), "all") == ["a b<e>"]


def test_an_instruction_is_a_turn_where_there_is_a_template() -> None:
    data = Samples("instruction", [Sample(text="Add.", answer="3")])
    assert learnt_of(make_tokenizer(QWEN), data) == ["3<|im_end|>\n"]
    plain = make_tokenizer()
    assert learnt_of(plain, data) == ["3<e>"]
    ((ids, _),) = encode(data, plain, "answers")
    assert plain.decode(ids) == ALPACA.format("Add.") + "3<e>"


@pytest.mark.parametrize(
    ("template", "messages", "part"),
    [
        (None, CHAT, "The tokenizer has no chat template, which says how a chat is written. Name one"),
        ("{{ raise_exception('No system here') }}", CHAT, "refuses a chat (No system here) that begins"),
        ("{{ messages[-1]['content'] | upper }}", CHAT, "does not show where the answer 'It is one.' is"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_do_is_said(
    template: str | None, messages: list[dict[str, Any]], part: str
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UnusableData) as error:
        learnt_of(tokenizer, chat_of(messages))
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_trl_reads_the_datasets_entry_and_what_is_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", lambda _: None)
    path = tmp_path / "sft_config.yaml"
    data = Dataset(
        name="someone/chats:en:train_sft",
        format="chat",
        loss_on="answers",
        text_field="messages",
        tokenizer="mine",
    )
    config = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=64,
        precision="fp32",
        optimizer="adamw_torch",
    )
    text = trl_config.EXPORTERS[0].write(
        workload=Workload(model="tiny", memory_budget_bytes=1, dataset=data),
        config=config,
        result={"evidence": "predicted"},
    )
    path.write_text(text)
    parser = trl.TrlParser(
        (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, DatasetMixtureConfig)
    )
    _, arguments, _, mixture = parser.parse_args_and_config(["--config", str(path)])
    (entry,) = mixture.datasets
    assert (entry.path, entry.name, entry.split) == ("someone/chats", "en", "train_sft")
    assert arguments.assistant_only_loss is True


def test_batches_pad_labels_and_flatten_them(tmp_path: Path) -> None:
    """The collators of the exported program keep what is not learnt so."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "ab", "completion": "cde"}, {"prompt": "a", "completion": "b"}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    data = read_samples(str(path), Columns(), "causal-lm")
    features = [{"input_ids": i, "labels": y} for i, y in encode(data, tokenizer, "answers")]
    padded = transformers.DataCollatorForSeq2Seq(tokenizer)([dict(each) for each in features])
    end = tokenizer.eos_token_id
    # The end of a text is learnt even where it is the token that pads, and no padding is.
    assert [row.tolist().count(end) for row in padded["labels"]] == [1, 1]
    assert padded["labels"][1].tolist()[3:] == [IGNORED] * 3
    assert padded["attention_mask"].sum(dim=1).tolist() == [6, 3]
    flat = transformers.DataCollatorWithFlattening()(features)
    assert flat["labels"][0].tolist() == [label for each in features for label in each["labels"]]


class Operations(TorchDispatchMode):
    """Every operation with the shapes of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        shapes = [tuple(each.shape) for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.made.append((str(func), shapes))
        return made


def test_what_is_learnt_changes_no_operation_of_a_step() -> None:
    """So the tracer needs to know nothing of it."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(32).view(2, 16)
    some = ids.masked_fill(ids % 16 < 12, IGNORED)

    def operations(labels: torch.Tensor) -> list[Any]:
        with Operations() as seen:
            num_learnt = (labels[:, 1:] != IGNORED).sum()
            model(input_ids=ids, labels=labels, num_items_in_batch=num_learnt).loss.backward()
        model.zero_grad()
        return seen.made

    whole = operations(ids)
    assert len(whole) > 100
    assert operations(some) == whole
