# SPDX-License-Identifier: Apache-2.0
"""Forward paths for sequences with images.

The model's own code computes one sequence at a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, SnapshotPlan, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import join_rows
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.step_runner import ForwardPath
from nereid_backend.vision.forward.feature_cache import FeatureCache
from nereid_backend.vision.forward.own_attention import OwnAttention

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

    def delete_unused_states(self) -> None:
        """Do nothing, because a `GeneratedPath` stores nothing about a sequence."""

    def _logits(self, chunk: Chunk) -> Tensor | None:
        """Return the logits of the next token after each of the last `chunk.num_logits` tokens.

        Example: a chunk ends with the token at index 9, and num_logits is 2. The result has the
        logits for the tokens at the indices 9 and 10. The shape is [num_logits, vocab_size]. Return
        None if `chunk.num_logits` is 0.
        """
        if chunk.num_logits == 0:
            return None
        # Each row of logits follows a prefix of the sequence. In the example, the two prefixes have
        # 9 tokens and 10 tokens.
        longest = chunk.start + chunk.num_tokens
        shortest = longest - chunk.num_logits + 1
        prefix_lengths = range(shortest, longest + 1)
        return torch.cat([self._logits_after(chunk.sequence, length) for length in prefix_lengths])

    def _logits_after(self, sequence: Sequence, num_tokens: int) -> Tensor:
        """Return the logits of the token after the first `num_tokens` tokens, [1, vocab_size].

        The whole sequence is computed again, because the model prepares images in its method
        `generate`.
        """
        ids = torch.tensor([sequence.token_ids[:num_tokens]], device=self._device)
        images = sequence.images
        arguments = {} if images is None else _with_token_types(images.arguments, num_tokens)
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


def _with_token_types(arguments: Mapping[str, object], num_tokens: int) -> dict[str, Any]:
    """Return the arguments for a sequence with images. Append token types for the newest tokens.

    The arguments contain token types only for the prompt. The result contains one token type for
    each of the first `num_tokens` tokens. The added type 0 means a text token.
    """
    extended = dict(arguments)
    for name in _TOKEN_ARGUMENTS:
        types = extended.get(name)
        if isinstance(types, Tensor):
            num_missing = num_tokens - types.shape[1]
            extended[name] = torch.nn.functional.pad(types, (0, num_missing))
    return extended


class SplitPath:
    """Computes sequences with images by one method, and all other sequences by another method."""

    def __init__(
        self,
        text: ForwardPath,
        images: SinglePath | GeneratedPath,
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
        chunk_has_images = [chunk.sequence.images is not None for chunk in plan.chunks]
        if not any(chunk_has_images):
            # No sequence in this step has images, so the forward path of images is not called. Free
            # the memory of sequences that had images and have ended.
            self._images.delete_unused_states()
            return self._text.forward(plan, sampled)
        assert not plan.pending, "async scheduling is off for models whose images use this path"
        text_plan, image_plan = _split_plan(plan, chunk_has_images)
        text_logits = self._text_logits(text_plan)
        image_logits = self._image_logits(image_plan)
        return _interleave(plan, chunk_has_images, text_logits, image_logits)

    def _text_logits(self, plan: StepPlan) -> Tensor | None:
        """Return the logits of the sequences without images; None if `plan` has nothing to do.

        A plan without chunks can still delete snapshots (stored copies of recurrent states).
        """
        if not plan.chunks and plan.snapshots is None:
            return None
        return self._text.forward(plan)

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
        return _join_rows(logits_of_chunks)

    def clear(self, sequence: Sequence) -> None:
        """Reset the stored data of a sequence, such as its KV cache, after a failed computation."""
        path = self._text if sequence.images is None else self._images
        path.clear(sequence)


def _join_rows(parts: list[Tensor]) -> Tensor:
    """Concatenate logits, a tensor for each chunk.

    A forward path returns a tensor with 0 rows if no logits are needed. The number of its columns
    can be wrong, so such tensors are left out. If there are no others, return the first tensor.
    """
    nonempty = [logits for logits in parts if len(logits)]
    return torch.cat(nonempty) if nonempty else parts[0]


def _split_plan(plan: StepPlan, chunk_has_images: list[bool]) -> tuple[StepPlan, StepPlan]:
    """Split a plan into the sequences without images and the sequences with images.

    Args:
        plan: the plan of a step. Each chunk in `plan.chunks` belongs to one sequence.
        chunk_has_images: for each chunk, whether its sequence has images.
    """
    text_chunks: list[Chunk] = []
    image_chunks: list[Chunk] = []
    for chunk, is_image_chunk in zip(plan.chunks, chunk_has_images, strict=True):
        if is_image_chunk:
            image_chunks.append(chunk)
        else:
            text_chunks.append(chunk)
    text_plan = replace(
        plan,
        chunks=text_chunks,
        num_tokens=sum(chunk.num_tokens for chunk in text_chunks),
        snapshots=_snapshots_without_images(plan.snapshots, chunk_has_images),
    )
    # Sequences with images do not use the engine's cache, so they need neither copies of KV cache
    # blocks (`copies`) nor stored copies of recurrent states (`snapshots`).
    image_plan = replace(
        plan,
        chunks=image_chunks,
        num_tokens=sum(chunk.num_tokens for chunk in image_chunks),
        copies=[],
        snapshots=None,
    )
    return text_plan, image_plan


def _snapshots_without_images(
    snapshots: SnapshotPlan | None, chunk_has_images: list[bool]
) -> SnapshotPlan | None:
    """Return the part of `snapshots` that belongs to sequences without images.

    `snapshots` refers to chunks by their index in the plan, and these indices change when the
    chunks with images are removed. Example: if `chunk_has_images` is [True, False], the index 1
    becomes 0.
    """
    if snapshots is None:
        return None
    text_indices = [
        index for index, is_image_chunk in enumerate(chunk_has_images) if not is_image_chunk
    ]
    new_indices = {index: new_index for new_index, index in enumerate(text_indices)}

    def renumber(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Replace the chunk index in each pair by the new chunk index, and return the new pairs.

        Each pair is (chunk index, snapshot id). Leave out the pairs of chunks with images.
        """
        return [
            (new_indices[index], snapshot_id)
            for index, snapshot_id in pairs
            if index in new_indices
        ]

    return SnapshotPlan(renumber(snapshots.loads), renumber(snapshots.saves), snapshots.deleted)


def _interleave(
    plan: StepPlan, chunk_has_images: list[bool], text_logits: Tensor | None, image_logits: Tensor
) -> Tensor:
    """Merge the logits of sequences with and without images, in the order of `plan.chunks`.

    Args:
        plan: the plan of the step.
        chunk_has_images: for each chunk, whether its sequence has images.
        text_logits: the logits of the sequences without images; None if there are none.
        image_logits: the logits of the sequences with images.
    """
    text_row, image_row = 0, 0  # the first row of the next chunk in each tensor
    parts = []
    for chunk, is_image_chunk in zip(plan.chunks, chunk_has_images, strict=True):
        if is_image_chunk:
            parts.append(image_logits[image_row : image_row + chunk.num_logits])
            image_row += chunk.num_logits
        else:
            assert text_logits is not None, "a chunk without images has logits"
            parts.append(text_logits[text_row : text_row + chunk.num_logits])
            text_row += chunk.num_logits
    return _join_rows(parts)
