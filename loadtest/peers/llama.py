# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a compared engine, through the low-level interface of llama-cpp-python.

The program converts the checkpoint to GGUF. It runs in an environment of its own
(`make bench-peers`) without torch.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from loadtest.peers.gguf_export import export
from loadtest.peers.workload import main, summary

_BATCH = 512


@dataclass
class _Slot:
    """A running sequence.

    Attributes:
        number: the index of the request.
        prompt: the token ids of the prompt.
        num_wanted: the number of tokens to generate.
        num_computed: the number of prompt tokens that are computed.
        num_answered: the number of generated tokens.
        last: the last generated token.
    """

    number: int
    prompt: list[int]
    num_wanted: int
    num_computed: int = 0
    num_answered: int = 0
    last: int = 0


class LlamaCpp:
    """A llama.cpp model; each call creates a context with one sequence for each prompt."""

    def __init__(self, path: str, workload: dict[str, Any]) -> None:
        file = Path(path) / f"model-{workload['dtype']}.gguf"
        if not file.is_file():
            export(Path(path), file, workload["dtype"])
        lib.llama_backend_init()
        quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(quiet, None)
        self._quiet = quiet
        self._model = lib.llama_model_load_from_file(
            os.fsencode(file), lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load the model file {file}.")
        self._threads = workload["threads"]
        self._vocab_size = workload["vocab_size"]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        with self._context(len(prompts), len(prompts[0]) + num_tokens) as (context, batch):
            tokens = []
            for sequence, prompt in enumerate(prompts):
                for start in range(0, len(prompt), _BATCH):
                    piece = prompt[start : start + _BATCH]
                    is_last = start + _BATCH >= len(prompt)
                    rows = [
                        (t, start + i, sequence, is_last and i == len(piece) - 1)
                        for i, t in enumerate(piece)
                    ]
                    self._decode(context, batch, rows)
                tokens.append(self._most_likely_token(context, -1))
            for step in range(1, num_tokens):
                place = len(prompts[0]) + step - 1
                rows = [(token, place, sequence, True) for sequence, token in enumerate(tokens)]
                self._decode(context, batch, rows)
                tokens = [self._most_likely_token(context, row) for row in range(len(prompts))]

    def mixed(self, plan: list[tuple[float, list[int], int]]) -> dict[str, Any]:
        """Run requests at their arrival times, with the batching of llama.cpp's server.

        Each batch computes the next token of every running sequence, and prompts fill the rest.
        """
        longest = max(len(prompt) + num_tokens for _, prompt, num_tokens in plan)
        started, first, waiting = time.perf_counter(), {}, list(enumerate(plan))
        slots: dict[int, _Slot] = {}
        with self._context(len(plan), longest) as (context, batch):
            while waiting or slots:
                now = time.perf_counter() - started
                while waiting and waiting[0][1][0] <= now:
                    number, (_, prompt, num_tokens) = waiting.pop(0)
                    slots[number] = _Slot(number, prompt, num_tokens)
                if not slots:
                    time.sleep(waiting[0][1][0] - now)
                    continue
                answered = self._advance(context, batch, list(slots.values()))
                for slot in answered:
                    first.setdefault(slot.number, time.perf_counter() - started)
                    if slot.num_answered == slot.num_wanted:
                        del slots[slot.number]
        total = sum(num_tokens for *_, num_tokens in plan)
        waits = [first[number] - at for number, (at, *_) in enumerate(plan)]
        return summary(waits, total, time.perf_counter() - started)

    def _advance(
        self,
        context: object,
        batch: Any,  # noqa: ANN401 - a ctypes structure
        slots: list[_Slot],
    ) -> list[_Slot]:
        """Run one batch, and return the sequences that got a token."""
        rows: list[tuple[int, int, int, bool]] = []
        answered: list[tuple[_Slot, int]] = []
        for slot in sorted(slots, key=lambda slot: slot.num_computed < len(slot.prompt)):
            if slot.num_computed >= len(slot.prompt):
                place = len(slot.prompt) + slot.num_answered - 1
                rows.append((slot.last, place, slot.number, True))
                answered.append((slot, len(rows) - 1))
                continue
            start = slot.num_computed
            piece = slot.prompt[start : start + _BATCH - len(rows)]
            slot.num_computed += len(piece)
            is_last = slot.num_computed == len(slot.prompt)
            for i, token in enumerate(piece):
                rows.append((token, start + i, slot.number, is_last and i == len(piece) - 1))
            if is_last:
                answered.append((slot, len(rows) - 1))
        self._decode(context, batch, rows)
        for slot, row in answered:
            slot.last = self._most_likely_token(context, row)
            slot.num_answered += 1
        return [slot for slot, _ in answered]

    @contextmanager
    def _context(self, num_sequences: int, length: int) -> Iterator[tuple[object, Any]]:
        """Yield a context for `num_sequences` sequences of `length` tokens, and an empty batch."""
        params = lib.llama_context_default_params()
        params.n_ctx = -(-length // 256) * 256 * num_sequences
        params.n_batch = params.n_ubatch = _BATCH
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self._threads
        context = lib.llama_init_from_model(self._model, params)
        batch = lib.llama_batch_init(max(_BATCH, num_sequences), 0, 1)
        try:
            yield context, batch
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def _decode(
        self,
        context: object,
        batch: Any,  # noqa: ANN401 - a ctypes structure
        rows: list[tuple[int, int, int, bool]],
    ) -> None:
        batch.n_tokens = len(rows)
        for i, (token, place, sequence, wants_logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = place
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants_logits
        code = lib.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with the error code {code}.")

    def _most_likely_token(self, context: object, row: int) -> int:
        logits = np.ctypeslib.as_array(
            lib.llama_get_logits_ith(context, row), shape=(self._vocab_size,)
        )
        return int(logits.argmax())


if __name__ == "__main__":
    main(LlamaCpp)
