# SPDX-License-Identifier: Apache-2.0
"""Computes the forward pass of one sequence at a time (the forward path `single`).

This path is used for models that cannot use any other path.

The path prepares inputs as transformers' `generate` does. The arguments that a model needs for the
next token, such as its cache, are stored for each sequence. If a model has no cache, every step
computes the whole sequence.

In an encoder-decoder model, the prompt is the input of the encoder. The input of the decoder begins
with the start token of the decoder, and the output tokens follow.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import ModelCall, UnfitError, join_rows, num_bytes


@dataclass(slots=True)
class _SequenceState:
    """The stored state of one sequence.

    Attributes:
        sequence: the sequence.
        arguments: the arguments of the next call of the model, including its cache.
        num_tokens: the number of tokens that the cache contains; 0 before the first call.
    """

    sequence: Sequence
    arguments: dict[str, Any]
    num_tokens: int


class SinglePath:
    """Computes the forward pass of one sequence at a time, and stores each sequence's state."""

    def __init__(self, checkpoint: Checkpoint, *, uses_cache: bool) -> None:
        """Create the object that runs the model's forward passes. No sequence has a state yet.

        Args:
            checkpoint: the model.
            uses_cache: whether the model's own cache is used. If False, each step computes the
                whole sequence.
        """
        self._model: Any = checkpoint.model
        self._device = checkpoint.device
        self._vocab_size = checkpoint.vocab_size
        self._adapters = checkpoint.adapters
        self._uses_cache = uses_cache
        self._has_encoder = bool(self._model.config.is_encoder_decoder)
        self._generation_config = self._model.generation_config
        call = ModelCall(checkpoint.model)
        # Whether the position ids of the tokens are passed to the model. transformers' `generate`
        # passes no position ids to encoder-decoder models.
        self._takes_positions = call.takes("position_ids") and not self._has_encoder
        # The name of the model's argument for the cache.
        self._cache_name = "cache_params" if call.takes("cache_params") else "past_key_values"
        # The stored state of each sequence. The key is the index of the sequence in the runner's
        # tables (`Sequence.row`).
        self._states: dict[int, _SequenceState] = {}

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Return the logits of one step, [num_logits, vocab_size]; see `ForwardPath.forward`.

        `sampled` must be None: only the path `packed` can compute a step whose input tokens are
        still being sampled.
        """
        assert sampled is None, "every input token is in the plan"
        self.delete_unused_states()
        parts: list[Tensor | None] = []
        for chunk in plan.chunks:
            state_key = chunk.sequence.row
            assert state_key is not None
            if chunk.is_first:
                # A preempted sequence can get its former row again. Its old state is then still
                # stored, but the sequence is computed from its beginning.
                self._states.pop(state_key, None)
            with self._adapters.serving_all(chunk.sequence.adapter):
                parts.append(self._chunk_logits(state_key, chunk))
        return join_rows(parts, self._vocab_size)

    def delete_unused_states(self) -> None:
        """Delete the states of sequences that have ended or were preempted.

        Other sequences use the memory of these states. Such a sequence has lost its row.
        """
        self._states = {
            row: state for row, state in self._states.items() if state.sequence.row == row
        }

    def clear(self, sequence: Sequence) -> None:
        """Delete the stored state of a sequence; see `ForwardPath.clear`."""
        if sequence.row is not None:
            self._states.pop(sequence.row, None)

    def stored_bytes(self) -> int:
        """Return the total size of the stored states of all sequences, in bytes."""
        return sum(num_bytes(state.arguments) for state in self._states.values())

    def _chunk_logits(self, state_key: int, chunk: Chunk) -> Tensor | None:
        """Return the logits of the last tokens of a chunk, [num_logits, vocab_size].

        The model is called once for each token whose logits are needed. Not every model can
        continue its cache by several tokens, so the call for the last token of the prompt computes
        the whole prompt. Example: a prompt is divided into the tokens 0 to 5 and 6 to 9. For the
        first chunk, nothing is computed, and the result is None. For the second chunk, one call
        computes all tokens from 0 to 9. The next chunk, token 10, continues the cache.

        `state_key` is the key of the sequence's state in `_states`.
        """
        if chunk.num_logits == 0:
            return None  # A later chunk of the prompt computes these tokens, too.
        sequence = chunk.sequence
        # The logits of the tokens with the indices `first` to `end - 1` are needed.
        end = chunk.start + chunk.num_tokens
        first = end - chunk.num_logits
        if self._uses_cache:
            # Extend the stored state, so that it covers all tokens before `first`.
            self._restore_state(state_key, sequence, num_tokens=first)
        # To report log-probabilities of the prompt, the logits of several prompt tokens are needed.
        reports_prompt_logprobs = first < sequence.num_prompt_tokens - 1
        if reports_prompt_logprobs and sequence.images is not None:
            # Most models do not accept a part of a prompt with images, so one call computes the
            # logits of the whole prompt.
            return self._image_prompt_logits(state_key, sequence, first, end)
        return torch.stack(
            [self._logits_at(state_key, sequence, index) for index in range(first, end)]
        )

    def _image_prompt_logits(
        self, state_key: int, sequence: Sequence, first: int, end: int
    ) -> Tensor:
        """Return the logits at the tokens `first` to `end - 1` of a sequence with images.

        `first` is a token of the prompt. One call of the model computes the whole prompt. A part of
        a prompt would lack some of the image tokens, and most models do not accept such a part. A
        separate call computes each output token.

        Mutates: the stored state of `state_key`.
        """
        prompt_len = sequence.num_prompt_tokens
        logits = self._run_model(state_key, sequence, num_tokens=prompt_len)
        # Take the last positions, because a model may add positions of its own before the prompt.
        prompt_logits = logits[-prompt_len:]
        output_logits = [
            self._logits_at(state_key, sequence, index) for index in range(prompt_len, end)
        ]
        return torch.stack([*prompt_logits[first:end], *output_logits])

    def _restore_state(self, state_key: int, sequence: Sequence, num_tokens: int) -> None:
        """Extend the stored state of a sequence, so that it covers the first `num_tokens` tokens.

        One call of the model computes the prompt, and one call computes each output token, because
        on some models one call for all tokens gives different logits. Example: for a prompt of 5
        tokens and num_tokens=7, the calls compute the tokens 0 to 4, the token 5, and the token 6.
        If the state already covers 6 tokens, only the token 6 is computed.

        Output tokens are missing in the state if a grammar has forced several tokens. No state is
        stored if the sequence was preempted. If `num_tokens` is less than the length of the prompt,
        nothing is computed, because the next call of the model computes the whole prompt.

        Mutates: the stored state of `state_key`.
        """
        prompt_len = sequence.num_prompt_tokens
        state = self._states.get(state_key)
        if state is not None and prompt_len <= state.num_tokens <= num_tokens:
            first_length = state.num_tokens + 1  # Extend the stored state by one token.
        else:
            first_length = prompt_len  # The first call computes the whole prompt.
        for length in range(first_length, num_tokens + 1):
            # This call stores a state that covers the first `length` tokens.
            self._run_model(state_key, sequence, length)

    def _logits_at(self, state_key: int, sequence: Sequence, index: int) -> Tensor:
        """Return the logits at the token with the index `index`, [vocab_size].

        Mutates: the stored state of `state_key`.
        """
        return self._run_model(state_key, sequence, num_tokens=index + 1)[-1]

    def _run_model(self, state_key: int, sequence: Sequence, num_tokens: int) -> Tensor:
        """Call the model for the first `num_tokens` tokens of a sequence, and return its logits.

        If the stored state covers all of these tokens except the last token, the model computes
        only the last token. Otherwise, the model computes all of these tokens. The model is called
        in the same way as by transformers' `generate`.

        Returns:
            The logits at each position that the model computes, [num_positions, vocab_size]. The
            last position is the last token.

        Mutates: the stored state of `state_key`.
        """
        # The stored state is removed before the call, because a failed call may have changed a part
        # of the cache.
        state = self._states.pop(state_key, None)
        if state is None or state.num_tokens != num_tokens - 1:
            state = self._state_before_first_call(sequence, num_tokens)
        inputs = self._next_arguments(state, self._decoder_tokens(sequence, num_tokens))
        output = self._model(**inputs, return_dict=True)
        if self._uses_cache:
            arguments = self._arguments_after_call(state, output)
            self._states[state_key] = _SequenceState(sequence, arguments, num_tokens)
        logits: Tensor = output.logits[0]
        return logits

    def _arguments_after_call(self, state: _SequenceState, output: object) -> dict[str, Any]:
        """Return the arguments for the next call, with the new cache and a longer attention mask.

        `state` is the state before the last call of the model, and `output` is the output of this
        call. The private method of transformers is the method that `generate` calls.
        """
        arguments: dict[str, Any] = self._model._update_model_kwargs_for_generation(
            output, state.arguments, is_encoder_decoder=self._has_encoder
        )
        return arguments

    def _next_arguments(self, state: _SequenceState, token_ids: list[int]) -> dict[str, Any]:
        """Return the arguments for the next call of the model, as `generate` prepares them.

        Args:
            state: the arguments from the previous call, such as the cache.
            token_ids: the tokens that the decoder has already read, followed by the new tokens.
        """
        is_first_call = state.num_tokens == 0
        num_new_tokens: int | None = 1
        if is_first_call:
            # Without a given cache, the model creates its own cache in this call, or works without
            # a cache. transformers requires None in these cases.
            has_cache = state.arguments.get(self._cache_name) is not None
            num_new_tokens = len(token_ids) if has_cache else None
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            torch.tensor([token_ids], device=self._device),
            next_sequence_length=num_new_tokens,
            is_first_iteration=is_first_call,
            **state.arguments,
        )
        return inputs

    def _state_before_first_call(self, sequence: Sequence, num_tokens: int) -> _SequenceState:
        """Return the state of a sequence before the first call of the model.

        The state contains the arguments of this call.

        In an encoder-decoder model, the arguments contain the encoder's outputs for the prompt.
        Otherwise, the first call computes the first `num_tokens` tokens.
        """
        num_first = sequence.num_prompt_tokens if self._has_encoder else num_tokens
        ids = torch.tensor([sequence.token_ids[:num_first]], device=self._device)
        return _SequenceState(sequence, self._first_arguments(ids, sequence.images), num_tokens=0)

    def _decoder_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return the decoder's input tokens for the first `num_tokens` tokens of a sequence.

        In an encoder-decoder model, the encoder reads the prompt, and the decoder reads a start
        token and the output tokens. Example: if the start token is 2, a prompt of 5 tokens and the
        output tokens 8 and 9 give [2, 8, 9].
        """
        if not self._has_encoder:
            return sequence.token_ids[:num_tokens]
        # The start token is `decoder_start_token_id` or, if this is None, `bos_token_id`.
        # transformers' `generate` uses the same token.
        start_token = self._generation_config.decoder_start_token_id
        if start_token is None:
            start_token = self._generation_config.bos_token_id
        if start_token is None:
            raise UnfitError("its generation config has no decoder_start_token_id")
        return [start_token, *sequence.token_ids[sequence.num_prompt_tokens : num_tokens]]

    def _first_arguments(self, ids: Tensor, images: ImageInputs | None) -> dict[str, Any]:
        """Return the arguments of the model's first call for a sequence.

        The arguments are those that transformers' `generate` would prepare.

        Args:
            ids: the tokens of the sequence, [1, num_tokens]. In an encoder-decoder model, `ids`
                contains the prompt, which the encoder computes in this function.
            images: the images of the prompt; None if there are none.
        """
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "use_cache": self._uses_cache,
        }
        if images is not None:
            arguments |= images.arguments
        if self._takes_positions:
            positions = self._model._prepare_position_ids_for_generation(ids, arguments)
            arguments["position_ids"] = positions
        if self._has_encoder:
            # This method of transformers runs the encoder, and adds its outputs to the arguments.
            arguments = self._model._maybe_prepare_encoder_kwargs_for_generation(
                ids, arguments, "input_ids", self._generation_config
            )
        if self._uses_cache:
            self._add_empty_cache(arguments, prompt_len=ids.shape[1])
        return arguments

    def _add_empty_cache(self, arguments: dict[str, Any], prompt_len: int) -> None:
        """Add an empty cache to the arguments of the model's first call for a sequence.

        Some models without an encoder do not support transformers' DynamicCache, for example
        because they have recurrent states. Such a model creates its own cache in the first call, so
        nothing is added.

        Mutates: `arguments`.
        """
        if self._has_encoder:
            # DynamicCache(config) could create a cross-attention cache with a sliding window. A
            # window would be wrong, because the decoder attends to all tokens of the prompt.
            # Therefore, use the private method of transformers that `generate` uses. The method
            # adds the cache to `arguments`.
            self._model._prepare_cache_for_generation(
                self._generation_config,
                model_kwargs=arguments,
                generation_mode=GenerationMode.GREEDY_SEARCH,
                batch_size=1,
                max_cache_length=prompt_len,
            )
        elif self._model._supports_default_dynamic_cache():
            decoder_config = self._model.config.get_text_config(decoder=True)
            arguments[self._cache_name] = DynamicCache(config=decoder_config)
