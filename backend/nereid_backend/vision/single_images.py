# SPDX-License-Identifier: Apache-2.0
"""Forward paths for sequences with images.

The model's own code computes one sequence at a time.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, SnapshotPlan, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import join_rows
from nereid_backend.step_runner import ForwardPath
from nereid_backend.vision.feature_cache import FeatureCache
from nereid_backend.vision.own_attention import OwnAttention

# These arguments of the model contain one value for each token of the prompt.
_TOKEN_ARGUMENTS = ("mm_token_type_ids", "token_type_ids")


class GeneratedPath:
    """Computes each new token by one call of the model's method `generate`.

    Some models prepare images in their own method `generate`. For each new token, the model
    computes the whole sequence again.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model: Any = checkpoint.model
        self._device = checkpoint.device
        self._vocab_size = checkpoint.vocab_size

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Return the logits for all sequences of `plan`.

        The shape is [sum of num_logits, vocab_size].

        `sampled` must be None, because this path does not support pending chunks: chunks whose
        input token is not known on the host yet.
        """
        assert sampled is None
        return join_rows([self._logits(chunk) for chunk in plan.chunks], self._vocab_size)

    def clear(self, sequence: Sequence) -> None:
        """Do nothing, because a `GeneratedPath` stores nothing about a sequence."""

    def _logits(self, chunk: Chunk) -> Tensor | None:
        """Return the logits of the next token after each of the last `chunk.num_logits` tokens.

        Example: a chunk ends with the token at index 9, and num_logits is 2. The result has the
        logits for the tokens at the indices 9 and 10. The shape is [num_logits, vocab_size]. Return
        None if `chunk.num_logits` is 0.
        """
        if chunk.num_logits == 0:
            return None
        end = chunk.start + chunk.num_tokens
        sequence = chunk.sequence
        return torch.cat(
            [
                self._logits_after(sequence, num_tokens)
                for num_tokens in range(end - chunk.num_logits + 1, end + 1)
            ]
        )

    def _logits_after(self, sequence: Sequence, num_tokens: int) -> Tensor:
        """Return the logits of the token after the first `num_tokens` tokens, [1, vocab_size].

        The whole sequence is computed again, because the model prepares images in its method
        `generate`.
        """
        ids = torch.tensor([sequence.token_ids[:num_tokens]], device=self._device)
        arguments = dict(sequence.images.arguments) if sequence.images is not None else {}
        # The arguments contain token types only for the prompt. Add the type 0 for each output
        # token, because 0 is the type of text tokens.
        for name in _TOKEN_ARGUMENTS:
            types = arguments.get(name)
            if isinstance(types, Tensor):
                num_missing = num_tokens - types.shape[1]
                arguments[name] = torch.nn.functional.pad(types, (0, num_missing))
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **arguments,
        )
        logits: Tensor = output.logits[0]
        return logits


class SplitPath:
    """Computes sequences with images by one method, and all other sequences by another method."""

    def __init__(
        self,
        text: ForwardPath,
        images: ForwardPath,
        features: FeatureCache,
        attention: OwnAttention,
    ) -> None:
        """Store the arguments.

        Args:
            text: the forward path of sequences without images.
            images: the forward path of sequences with images. This path uses the model's own
                attention.
            features: the cache of image features.
            attention: replaces the engine's attention temporarily by the model's own attention.
        """
        self._text = text
        self._images = images
        self._features = features
        self._attention = attention

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Return the logits for all sequences of `plan`, in the order of `plan.chunks`.

        The shape is [sum of num_logits, vocab_size]. `sampled` contains the tokens of the previous
        step on the device. Only a step without images can use them.
        """
        has_images = [chunk.sequence.images is not None for chunk in plan.chunks]
        if not any(has_images):
            return self._text.forward(plan, sampled)
        assert not plan.pending, "async scheduling is off for models whose images use this path"
        text_plan = _plan_of_sequences(plan, has_images, with_images=False)
        image_plan = _plan_of_sequences(plan, has_images, with_images=True)
        # `parts[True]` contains the logits of the sequences with images, and `parts[False]`
        # contains the logits of the sequences without images.
        parts: dict[bool, Tensor] = {}
        # A snapshot is a stored copy of a recurrent state. `forward` also deletes snapshots.
        # Therefore, if `text_plan` has snapshots, call `forward` even if all sequences have images.
        if text_plan.chunks or text_plan.snapshots is not None:
            parts[False] = self._text.forward(text_plan)
        parts[True] = self._image_logits(image_plan)
        return _interleave(plan, has_images, parts)

    def _image_logits(self, plan: StepPlan) -> Tensor:
        """Return the logits of sequences with images, in the order of `plan.chunks`.

        Each call of the forward path computes one chunk, so that the cache of image features can
        store the features under the digest of the chunk's images.
        """
        logits_of_chunks = []
        # In this block, the model uses its own attention. The engine's attention reads KV cache
        # blocks, but sequences with images have no such blocks.
        with self._attention.activated():
            for chunk in plan.chunks:
                images = chunk.sequence.images
                assert images is not None
                chunk_plan = replace(plan, chunks=[chunk], num_tokens=chunk.num_tokens)
                with self._features.used_for(images.digest):
                    logits_of_chunks.append(self._images.forward(chunk_plan))
        # If a chunk needs no logits, `forward` returns a tensor with 0 rows. The number of its
        # columns can be wrong, and tensors with different numbers of columns cannot be
        # concatenated. Therefore leave out the tensors with 0 rows.
        nonempty = [logits for logits in logits_of_chunks if len(logits)]
        return torch.cat(nonempty) if nonempty else logits_of_chunks[0]

    def clear(self, sequence: Sequence) -> None:
        """Reset the stored data of a sequence, such as its KV cache, after a failed computation."""
        path = self._text if sequence.images is None else self._images
        path.clear(sequence)


def _plan_of_sequences(plan: StepPlan, has_images: list[bool], *, with_images: bool) -> StepPlan:
    """Return a part of `plan`: either the sequences with images, or the sequences without images.

    Args:
        plan: the plan of a step. Each chunk in `plan.chunks` belongs to one sequence.
        has_images: for each chunk, whether its sequence has images.
        with_images: whether the result contains the sequences with images. If False, the result
            contains the sequences without images.
    """
    flagged_chunks = zip(plan.chunks, has_images, strict=True)
    chunks = [chunk for chunk, has in flagged_chunks if has == with_images]
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    # `plan.copies` lists the KV cache blocks to copy, and `plan.snapshots` refers to stored copies
    # of recurrent states. Sequences with images do not use the engine's cache, so they need neither
    # copies of blocks nor snapshots.
    copies = [] if with_images else plan.copies
    snapshots = None if with_images else _snapshots_without_images(plan.snapshots, has_images)
    return replace(plan, chunks=chunks, num_tokens=num_tokens, copies=copies, snapshots=snapshots)


def _snapshots_without_images(
    snapshots: SnapshotPlan | None, has_images: list[bool]
) -> SnapshotPlan | None:
    """Return the part of `snapshots` that belongs to sequences without images.

    `snapshots` refers to chunks by their index in the plan, and these indices change when the
    chunks with images are removed. Example: with has_images [True, False], the index 1 becomes 0.
    """
    if snapshots is None:
        return None
    text_indices = [index for index, has in enumerate(has_images) if not has]
    new_indices = {index: new_index for new_index, index in enumerate(text_indices)}
    # A snapshot is a stored copy of the recurrent state of a sequence. Each item of `loads` and
    # `saves` is a pair: the index of a chunk, and the id of a snapshot.
    loads = [(new_indices[index], id_) for index, id_ in snapshots.loads if index in new_indices]
    saves = [(new_indices[index], id_) for index, id_ in snapshots.saves if index in new_indices]
    return SnapshotPlan(loads, saves, snapshots.deleted)


def _interleave(plan: StepPlan, has_images: list[bool], parts: dict[bool, Tensor]) -> Tensor:
    """Merge the logits of sequences with and without images, in the order of `plan.chunks`.

    Args:
        plan: the plan of the step.
        has_images: for each chunk, whether its sequence has images.
        parts: `parts[True]` are the logits of the sequences with images, and `parts[False]` are the
            logits of the other sequences.
    """
    next_rows = {False: 0, True: 0}
    rows = []
    for chunk, has in zip(plan.chunks, has_images, strict=True):
        if chunk.num_logits:
            start = next_rows[has]
            next_rows[has] = start + chunk.num_logits
            rows.append(parts[has][start : start + chunk.num_logits])
    # If no chunk has logits, return `parts[True]`, which is then a tensor with 0 rows.
    return torch.cat(rows) if rows else parts[True]
