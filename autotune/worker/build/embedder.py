"""A model that embeds texts: Transformers' model, and what sentence-transformers puts behind it.

What comes behind is read off the model's own files (autotune.catalogue.embeddings); no code of a repository
runs. The first of its modules is a plain one, which asks the model for what sentence-transformers 6.2 does
(base/modules/transformer.py, Transformer.forward): it is there without a folder to load from.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

from autotune.catalogue.embeddings import BEHIND
from autotune.errors import first_line
from autotune.space.trainers import Trainer
from autotune.worker.build.layers import inner_of
from autotune.worker.build.model import UnsupportedModel

READ = ("input_ids", "token_type_ids", "attention_mask")
"""Tensors of tokens that a tokenizer may give, in the order in which the usual one does."""


def tensors_read(model: Any) -> tuple[str, ...]:
    """Return the tensors that the tokenizer of a model's family gives, of those that the model takes."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    inner = inner_of(model)
    taken = inspect.signature(inner.forward).parameters
    family = inner.config.model_type
    kind = getattr(transformers, TOKENIZER_MAPPING_NAMES.get(family) or "", None)
    given = getattr(kind, "model_input_names", ("input_ids", "attention_mask"))
    return tuple(name for name in READ if name in given and name in taken)


class Encoder(nn.Module):
    """The first module of an embedder: Transformers' model, which gives a vector for each token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def preprocess(self, inputs: Sequence[str], **_: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of texts that are numbers, as a probe has them: it has no tokenizer.

        Of every second one that is as long as the longest the last is taken for none, as in a trace some are.
        """
        rows = [[int(number) for number in text.split()] for text in inputs]
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        if longest > 1:
            mask[1::2, -1] = 0
        tensors = {READ[0]: ids, READ[1]: torch.zeros_like(ids), READ[2]: mask}
        wanted = tensors_read(self.model)
        return {name: tensor for name, tensor in tensors.items() if name in wanted}

    def save(self, output_path: str, **_: Any) -> None:
        self.model.save_pretrained(output_path)  # type: ignore[operator]

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        given = {name: features[name] for name in READ if name in features}
        features["token_embeddings"] = self.model(**given, return_dict=True)["last_hidden_state"]
        return features


def embedder(model: Any, device: torch.device) -> Any:
    """Return the SentenceTransformer of a model, by what its configuration says comes behind it.

    Raises UnsupportedModel where that cannot be planned, or the library is not installed.
    """
    kind, card = embedder_class()
    config = inner_of(model).config
    if config.is_encoder_decoder:
        raise UnsupportedModel("an encoder beside a decoder is not trained to embed texts here")
    width = config.get_text_config().hidden_size
    modules = [Encoder(model), *modules_behind(config, width)]
    # The card of a model that nobody is to see has no examples, which would be embedded.
    said = card(generate_widget_examples=False, local_files_only=True)
    return kind(modules=modules, device=str(device), model_card_data=said)


def make_loss(model: Any, trainer: Trainer, mini_batch: int | None) -> Any:
    """Make the loss, cached where mini-batches have a size."""
    from sentence_transformers.sentence_transformer import losses

    if mini_batch is None:
        return getattr(losses, trainer.loss)(model)
    return getattr(losses, trainer.cached_loss)(model, mini_batch_size=mini_batch)


def modules_behind(config: Any, width: int) -> list[nn.Module]:
    """Return the modules that make a text's vector of its tokens'.

    Raises UnsupportedModel where the model's files name others than those which are planned.
    """
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    said = getattr(config, BEHIND, None) or {}
    if others := said.get("others"):
        raise UnsupportedModel(
            f"its vectors go through {others}: pooling, plain dense layers, norms and normalizing alone are "
            "planned here"
        )
    try:
        pooling = Pooling(width, said.get("pooling", "mean"))
    except ValueError as error:
        raise UnsupportedModel(first_line(error)) from error
    layers = [_layer(fields) for fields in said.get("layers", ())]
    width = pooling.get_embedding_dimension()
    for fields in said.get("layers", ()):
        reads = fields.get("in_features", fields.get("dimension"))
        if reads != width:
            raise UnsupportedModel(
                f"a module behind it reads vectors of {reads} numbers, and is given {width}"
            )
        width = fields.get("out_features", width)
    return [pooling, *layers, *([Normalize()] if said.get("normalizes") else [])]


def _layer(fields: dict[str, Any]) -> nn.Module:
    """Return a dense layer, or a norm, with random weights."""
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm

    if "dimension" in fields:
        made: nn.Module = LayerNorm(**fields)
        return made
    activation = getattr(nn, fields["activation"])()
    sizes = {name: value for name, value in fields.items() if name != "activation"}
    dense: nn.Module = Dense(**sizes, activation_function=activation)
    return dense


@functools.cache
def embedder_class() -> tuple[Any, Any]:
    """Return a SentenceTransformer that says what model it is made of, as PEFT's do, and its card's class.

    Raises UnsupportedModel where the library is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer, SentenceTransformerModelCardData
    except ImportError as error:
        raise UnsupportedModel(
            f"sentence-transformers is not installed here ({error}). It needs: pip install "
            "sentence-transformers"
        ) from error

    class Embedder(SentenceTransformer):
        @property
        def embedding_model(self) -> Any:
            return self[0].model

        def get_base_model(self) -> Any:
            return inner_of(self.embedding_model)

    return Embedder, SentenceTransformerModelCardData
