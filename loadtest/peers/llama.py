"""A program that measures llama.cpp, through the low-level interface of llama-cpp-python.

The program converts the checkpoint to GGUF. It runs in a Python environment without torch, which
`make bench-peers` creates.
"""

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp as lib
import numpy as np

from loadtest.peers.workload import Peer, Prompts, Settings, Workload, main

_STEP_TOKENS = 512
# The size of a sequence in the KV cache is rounded up to a multiple of this number of tokens.
_SPACE_MULTIPLE = 256
# llama.cpp interprets this row number as the last row.
_LAST_ROW = -1


class Token(NamedTuple):
    """A token in a batch of llama.cpp."""

    token_id: int
    position: int  # the position in the sequence
    sequence: int  # the number of the sequence
    has_logits: bool  # whether llama.cpp computes the logits after this token


class LlamaCpp(Peer):
    """A llama.cpp model. Each call of `generate` creates a context with one sequence per prompt."""

    def __init__(self, path: str, workload: Workload, settings: Settings) -> None:
        file = gguf_file(Path(path), settings.get("gguf_type"))
        lib.llama_backend_init()
        # llama.cpp calls this function during the whole run, so the attribute keeps the function
        # alive.
        self._ignore_log = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._ignore_log, None)
        self._model = lib.llama_model_load_from_file(
            os.fsencode(file), lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load the model file {file}.")
        self._threads = workload.threads
        self._vocab_size = workload.vocab_size

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        prompt_length = len(prompts[0])
        with self._context(len(prompts), prompt_length + num_tokens) as (context, batch):
            token_ids = []
            for sequence, prompt in enumerate(prompts):
                for tokens in prompt_steps(prompt, sequence):
                    self._run_step(context, batch, tokens)
                token_ids.append(self._most_likely_token(context, _LAST_ROW))
            for position in range(prompt_length, prompt_length + num_tokens - 1):
                tokens = [
                    Token(token_id, position, sequence, has_logits=True)
                    for sequence, token_id in enumerate(token_ids)
                ]
                self._run_step(context, batch, tokens)
                token_ids = [self._most_likely_token(context, row) for row in range(len(prompts))]

    @contextmanager
    def _context(self, num_sequences: int, length: int) -> Iterator[tuple[object, Any]]:
        """Yield a context for `num_sequences` sequences of `length` tokens, and an empty batch."""
        params = lib.llama_context_default_params()
        sequence_space = math.ceil(length / _SPACE_MULTIPLE) * _SPACE_MULTIPLE
        params.n_ctx = sequence_space * num_sequences
        params.n_batch = params.n_ubatch = _STEP_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self._threads
        context = lib.llama_init_from_model(self._model, params)
        batch = lib.llama_batch_init(
            max(_STEP_TOKENS, num_sequences),
            0,
            1,  # no embeddings, one sequence for each token
        )
        try:
            yield context, batch
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def _run_step(
        self,
        context: object,
        batch: Any,  # noqa: ANN401 - a ctypes structure
        tokens: Sequence[Token],
    ) -> None:
        """Run one step of the model with `tokens`."""
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row] = token.token_id
            batch.pos[row] = token.position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = token.sequence
            batch.logits[row] = token.has_logits
        code = lib.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with the error code {code}.")

    def _most_likely_token(self, context: object, row: int) -> int:
        """Return the token with the highest logit in row `row` of the last step's logits."""
        logits = np.ctypeslib.as_array(
            lib.llama_get_logits_ith(context, row), shape=(self._vocab_size,)
        )
        return int(logits.argmax())


def prompt_steps(prompt: Sequence[int], sequence: int) -> Iterator[list[Token]]:
    """Yield the tokens of each step for one prompt. Only the last token of a prompt has logits."""
    tokens = [
        Token(token_id, position, sequence, has_logits=position == len(prompt) - 1)
        for position, token_id in enumerate(prompt)
    ]
    for start in range(0, len(tokens), _STEP_TOKENS):
        yield tokens[start : start + _STEP_TOKENS]


def gguf_file(checkpoint: Path, gguf_type: str | None) -> Path:
    """Return the GGUF file of a checkpoint, and create the file if it does not exist.

    `gguf_type` is the quantization, such as "Q4_0", or None if the weights are not quantized.
    Another process creates the file, because the peak memory of this process is measured.
    """
    kinds = [gguf_type] if gguf_type else []
    file = checkpoint / f"{'-'.join(['model', *kinds])}.gguf"
    if not file.is_file():
        command = [sys.executable, "-m", "loadtest.peers.gguf_export", str(checkpoint), str(file)]
        subprocess.run([*command, *kinds], check=True, stdout=subprocess.DEVNULL)
    return file


if __name__ == "__main__":
    main(LlamaCpp)
