# SPDX-License-Identifier: Apache-2.0
"""Chooses the method that computes the output of a model's classification head."""

import torch
from torch import Tensor

from nereid_backend.errors import UnsupportedModelError
from nereid_backend.pooling.forward.choose_forward import ChosenForward, own_attention
from nereid_backend.pooling.forward.packed_texts import TokenBatch
from nereid_backend.pooling.forward.pooling_forward import Head, HeadMethod
from nereid_backend.pooling.forward.self_check_texts import (
    MODEL_ERRORS,
    TOLERANCE,
    random_batch,
    relative_difference,
    self_check_lens,
)
from nereid_backend.pooling.loading.load_encoder import Encoder


@torch.inference_mode()
def choose_head(
    encoder: Encoder, chosen: ChosenForward, name: str, max_len: int, *, per_token: bool
) -> Head:
    """Choose the method that computes the output of a model's classification head.

    Some heads need only the vector of each text's first or last token. Other heads need the vectors
    of all tokens, or a run of the whole model. Each method is tested on texts of random tokens. The
    output of a method for a batch must equal the output of the whole model for each text alone,
    except for rounding errors. The cheapest method that passes this test is chosen.

    Args:
        encoder: the model.
        chosen: the method of computing token vectors.
        name: the name of the model's class, for error messages.
        max_len: the length limit of inputs in tokens.
        per_token: whether the head classifies single tokens instead of whole texts.

    Mutates: the model's attention implementation, but only if the whole model must be run to
    compute the head's output.

    Raises:
        UnsupportedModelError: the head cannot compute one text, or its output for a batch is wrong
            with every method.
    """
    batch = random_batch(encoder, self_check_lens(max_len))
    hidden = chosen.forward(batch)
    try:
        expected = _whole_model_logits(encoder, chosen, batch)
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"the head of {name} is not supported, because it cannot compute one text "
            f"({type(error).__name__}: {error}). Use another checkpoint."
        ) from error
    # The name of a method states which token vectors the head gets (see `HeadMethod`). The cheapest
    # method comes first.
    methods: tuple[HeadMethod, ...] = ("tokens",) if per_token else ("first", "last", "all")
    for method in methods:
        head = Head(encoder, method, per_token)
        if _find_output_error(head, hidden, batch, expected) is None:
            return head
    # Run the whole model as transformers itself does, with the model's own attention.
    encoder.model.set_attn_implementation(encoder.own_attention)
    whole_model = Head(encoder, "whole", per_token)
    reason = _find_output_error(whole_model, hidden, batch, expected)
    if reason is not None:
        raise UnsupportedModelError(
            f"the head of {name} is not supported: {reason}. Use a model of another architecture."
        )
    return whole_model


def _whole_model_logits(encoder: Encoder, chosen: ChosenForward, batch: TokenBatch) -> Tensor:
    """Run the whole model with its own attention on one text at a time, and return the logits.

    Args:
        encoder: the model.
        chosen: the method of computing token vectors. If this method uses Nereid's attention, the
            model is switched to its own attention for these runs, and then switched back.
        batch: the texts.

    Shapes: returns float32 [num_texts, num_labels], or [num_tokens, num_labels] if the head
    classifies single tokens.
    """
    logits_of_texts = []
    with own_attention(encoder, chosen):
        for text in batch.split():
            arguments = {"input_ids": text.token_ids[None]}
            if text.type_ids is not None:
                arguments["token_type_ids"] = text.type_ids[None]
            logits = encoder.model(**arguments).logits.float()
            if logits.ndim == 3:
                # A classification head for single tokens returns logits of the shape [1, length,
                # num_labels].
                logits = logits[0]
            logits_of_texts.append(logits)
    return torch.cat(logits_of_texts)


def _find_output_error(
    head: Head, hidden: Tensor, batch: TokenBatch, expected: Tensor
) -> str | None:
    """Compare the output of a classification head with the correct logits.

    Return the reason why the output is wrong, or None if the output is correct. Example: "its
    output has the shape (2, 3)".

    Args:
        head: the head.
        hidden: the token vectors of the texts, [num_tokens, hidden_size].
        batch: the texts.
        expected: the correct logits, float32 (see Head.logits for the shape).
    """
    try:
        output = head.logits(hidden, batch).float()
    except MODEL_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    if output.shape != expected.shape:
        return f"its output has the shape {tuple(output.shape)}"
    difference = relative_difference(output, expected)
    if difference <= TOLERANCE[head.encoder.dtype]:
        return None
    return f"its output differs from the whole model's by {difference:.2g} (relative)"
