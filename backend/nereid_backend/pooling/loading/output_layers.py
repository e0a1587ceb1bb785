# SPDX-License-Identifier: Apache-2.0
"""The layers that convert the transformers model's token vectors to the outputs."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from nereid_backend.pooling.loading.checkpoint_spec import MASKED, CheckpointSpec
from nereid_backend.pooling.loading.late_interaction_files import (
    STANFORD_ARCHITECTURE,
    STANFORD_PROJECTION,
)
from nereid_backend.pooling.loading.load_encoder import Encoder
from nereid_backend.pooling.loading.sentence_modules import MULTI_VECTOR_FILE, SPARSE_FILE
from nereid_backend.pooling.loading.vector_layers import (
    Layer,
    load_layer,
    load_linear,
    load_projection,
)

# If a model has dense and sparse output, the sparse output contains no weights for certain special
# tokens. The following names are the tokenizer's attributes for these tokens.
_TOKENS_WITHOUT_WEIGHT = (
    *("cls_token_id", "eos_token_id", "sep_token_id"),
    *("pad_token_id", "unk_token_id"),
)


@dataclass(frozen=True, slots=True)
class OutputLayers:
    """The layers that convert token vectors to the outputs.

    Attributes:
        tokens: the layers that convert token vectors to token vectors, in order.
        vector: the layers that convert the pooled vector to a vector, in order.
        sparse: for a model with dense and sparse output, the layer that converts a token vector to
            a weight.
        multi_vector: for a model with dense and multi-vector output, the layer that converts token
            vectors to the output vectors.
        ids_without_output: the ids of the tokens that have no weight in the sparse output, and no
            vector in a multi-vector output (see LateInteraction.skip_roles).
    """

    tokens: list[Layer] = field(default_factory=list)
    vector: list[Layer] = field(default_factory=list)
    sparse: Layer | None = None
    multi_vector: Layer | None = None
    ids_without_output: frozenset[int] = frozenset()


def load_output_layers(root: Path, spec: CheckpointSpec, encoder: Encoder) -> OutputLayers:
    """Load the layers that convert token vectors to the outputs.

    Args:
        root: the folder of the checkpoint.
        spec: the description of the checkpoint.
        encoder: the loaded model, which determines the device of the layers.

    Raises:
        ModelError: weights are missing or broken.
        UnsupportedModelError: the activation of a layer is not supported.
    """
    device = encoder.device
    sparse = load_linear(root / SPARSE_FILE, device) if _has_sparse_layer(spec) else None
    # If the model has only multi-vector output, the token vectors themselves are the output.
    has_multi_vector_layer = "multi_vector" in spec.kinds and "dense" in spec.kinds
    multi_vector = load_linear(root / MULTI_VECTOR_FILE, device) if has_multi_vector_layer else None
    return OutputLayers(
        tokens=_load_token_layers(root, spec, device),
        vector=[load_layer(module, device) for module in spec.vector_modules],
        sparse=sparse,
        multi_vector=multi_vector,
        ids_without_output=_ids_without_output(spec, encoder),
    )


def _load_token_layers(root: Path, spec: CheckpointSpec, device: torch.device) -> list[Layer]:
    """Load the layers that replace each token vector by a new token vector."""
    layers = [load_layer(module, device) for module in spec.token_modules]
    if spec.architecture == STANFORD_ARCHITECTURE:
        # A checkpoint of Stanford's ColBERT library does not list modules. Its projection is a
        # linear layer, which is stored with the weights of the encoder. This layer comes before the
        # scaling to length 1.
        layers.insert(0, load_projection(root, STANFORD_PROJECTION, device))
    return layers


def _has_sparse_layer(spec: CheckpointSpec) -> bool:
    """Return whether the checkpoint has a separate layer that computes sparse output.

    In a SPLADE model (MASKED), the layers for masked language modelling compute this output.
    """
    return "sparse" in spec.kinds and spec.loader != MASKED


def _ids_without_output(spec: CheckpointSpec, encoder: Encoder) -> frozenset[int]:
    """Return the ids of the tokens that the output leaves out.

    Sparse output contains no weights for these tokens, and multi-vector output contains no vectors.
    If the model has a sparse layer, the result contains the tokenizer's CLS, EOS, SEP, PAD and UNK
    tokens. If the files of a multi-vector model name further tokens, such as punctuation, the
    result contains these tokens.
    """
    ids_without_output: set[int] = set()
    if _has_sparse_layer(spec):
        special_ids = (getattr(encoder.tokenizer, name, None) for name in _TOKENS_WITHOUT_WEIGHT)
        ids_without_output = {token_id for token_id in special_ids if token_id is not None}
    words = spec.late_interaction.skip_words
    if words:
        vocabulary = encoder.tokenizer.get_vocab()
        ids_without_output |= {vocabulary[word] for word in words if word in vocabulary}
    return frozenset(ids_without_output)
