# SPDX-License-Identifier: Apache-2.0
"""The inputs and the results of embedding models and rerankers."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

KINDS = ("dense", "sparse", "multi_vector", "score", "classify", "token_classify")
ACTIVATIONS = ("none", "sigmoid", "softmax")

Floats = NDArray[np.float32]
Value = Floats | dict[int, float] | float


@dataclass(frozen=True, slots=True)
class PoolingItem:
    """One input and its options.

    Exactly one of the fields text, token_ids, pair and image is set. Exception: text and image may
    both be set.

    Attributes:
        kind: the kind of output, one of PoolingInfo.kinds. An empty string means the first kind in
            PoolingInfo.kinds.
        text: a text. The tokenizer adds its special tokens to the text.
        token_ids: the token ids of a text. No special tokens are added to them.
        pair: a query and a document. The document is a text or the content of an image file.
        image: the content of an image file.
        dimensions: the size of the returned vectors. If a vector is longer, only its first elements
            are returned. None means that all elements are returned.
        normalize: whether the vector is scaled to length 1. None means the checkpoint's default.
        activation: the activation of scores, one of ACTIVATIONS. None means the checkpoint's
            default.
        prompt_name: the name of a prompt of the checkpoint. The prompt precedes the text.
        prompt: a text that precedes the input text, instead of a prompt of the checkpoint.
        instruction: a sentence that describes which documents are relevant. Only
            rerankers whose prompts contain an instruction accept one. None means the default
            instruction.
        truncate: whether an input that is too long is truncated. If False, such an input is
            refused.
    """

    kind: str = ""
    text: str | None = None
    token_ids: list[int] | None = None
    pair: tuple[str, str | bytes] | None = None
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
    """The description of a loaded model.

    Attributes:
        model: the folder of the checkpoint.
        architecture: the name of the model's class in its config.
        task: "embed", "rerank" or "classify".
        kinds: the kinds of output that the model can compute. The default kind is first.
        dimension: the size of a dense vector, and the size of each vector of a multi-vector output.
            If the model has only sparse output, `dimension` is the size of the vocabulary. If the
            model computes scores, `dimension` is 0.
        max_model_len: the length limit of inputs in tokens.
        max_token_bytes: the number of bytes of the longest token.
        vocab_size: the number of valid token ids.
        pooling: a readable description of the pooling method.
        normalizes: whether dense vectors are scaled to length 1 by default.
        activation: the default activation of scores.
        path: the name of the method that computes batches. "packed": without padding. "padded":
            with padding, because the model cannot compute packed batches. "rows": all texts of a
            batch have equal lengths, because padding changes the model's output. "single": one
            input at a time, because an input may contain an image.
        labels: the labels of a classifier, in the order of its scores.
        prompts: the texts of the checkpoint's prompts by name.
        default_prompt_name: the name of the prompt for inputs without a prompt name; None if such
            inputs have no prompt.
        accepts_images: whether inputs can be images.
        device: the device of the weights.
        dtype: the data type of the weights.
        max_batch_tokens: the largest number of tokens in one step.
        self_check_difference: a relative difference that was measured when the model was loaded.
            Some texts were computed in one batch and one by one, and the outputs were compared.
        load_seconds: the duration of loading in seconds.
    """

    model: str
    architecture: str
    task: str
    kinds: tuple[str, ...]
    dimension: int
    max_model_len: int
    max_token_bytes: int
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
    """The result of one input.

    Attributes:
        request_id: the id of the request.
        index: the index of the input in its request.
        value: the output; None if there is an error. The type depends on the kind of output:
            dense: float32 [dim].
            sparse: a dict from token ids to weights.
            multi_vector: float32 [num_tokens, dim].
            score: a float.
            classify: float32 [num_labels].
            token_classify: float32 [num_tokens, num_labels].
        num_tokens: the number of tokens of the input, including special tokens.
        error: the reason why there is no value; None if there is no error.
        offsets: for the kind token_classify, the range of characters that belongs to each token,
            int32 [num_tokens, 2]. A range consists of the index of the first character and the
            index after the last character. The range of a special token is empty. None for other
            kinds.
    """

    request_id: str
    index: int
    value: Value | None
    num_tokens: int
    error: str | None = None
    offsets: NDArray[np.int32] | None = None
