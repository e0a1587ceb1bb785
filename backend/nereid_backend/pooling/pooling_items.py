# SPDX-License-Identifier: Apache-2.0
"""What goes into a pooling engine and what comes out."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

KINDS = ("dense", "sparse", "multi_vector", "score", "classify")
ACTIVATIONS = ("none", "sigmoid", "softmax")

Floats = NDArray[np.float32]
Value = Floats | dict[int, float] | float


@dataclass(frozen=True, slots=True)
class PoolingItem:
    """One input and what is wanted of it. Exactly one of text, token_ids, pair and image is given.

    Attributes:
        kind: one of the engine's kinds; "" is its first.
        text: tokenised with the model's special tokens.
        token_ids: used as they are; no special tokens are added.
        pair: query and document.
        image: the bytes of an image file.
        dimensions: keep so many of a dense vector's numbers; None: all.
        normalize: to length 1; None: as the checkpoint says.
        activation: of scores, one of ACTIVATIONS; None: as the checkpoint says.
        prompt_name: one of the checkpoint's prompts, put before the text.
        prompt: text that is put before the text.
        instruction: of a judge: what makes a document relevant; None: the usual one.
        truncate: cut what is too long instead of refusing it.
    """

    kind: str = ""
    text: str | None = None
    token_ids: list[int] | None = None
    pair: tuple[str, str] | None = None
    image: bytes | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """Facts about a loaded model.

    Attributes:
        model: the checkpoint's folder.
        architecture: the class that its config names.
        task: "embed", "rerank" or "classify".
        kinds: what it gives, the usual one first.
        dimension: of a dense vector, or of each of several; the vocabulary's size for a sparse one
            alone; 0 where there is none.
        max_model_len: longest input in tokens.
        vocab_size: token ids below this can be given.
        pooling: how token vectors become one, as words for people.
        normalizes: whether dense vectors have length 1 unless asked otherwise.
        activation: of scores unless asked otherwise.
        path: "packed"; "padded" where the model does not run packed; "rows", batches of texts of
            one length, where padding changes what it gives.
        labels: of a classifier, in the order of its scores.
        prompts: names and texts.
        default_prompt_name: the prompt of inputs that name none; None: no prompt.
        accepts_images: whether inputs may be images.
        device: where the weights are.
        dtype: of the weights.
        max_batch_tokens: about so many tokens go through the model in one step.
        self_check_difference: of a mixed batch from each input alone, relative.
        load_seconds: time that loading took.
    """

    model: str
    architecture: str
    task: str
    kinds: tuple[str, ...]
    dimension: int
    max_model_len: int
    vocab_size: int
    pooling: str
    normalizes: bool
    activation: str
    path: str
    labels: tuple[str, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    accepts_images: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    max_batch_tokens: int = 0
    self_check_difference: float = 0.0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolingResult:
    """What one input of a request came to.

    Attributes:
        request_id: the request's.
        index: the input's place in the request.
        value: dense: [dim] float32; sparse: token id to weight; multi_vector: [num_tokens, dim]
            float32; score: a number; classify: [num_labels] float32. None when there is an error.
        num_tokens: tokens of the input, special ones included.
        error: why there is no value.
    """

    request_id: str
    index: int
    value: Value | None
    num_tokens: int
    error: str | None = None
