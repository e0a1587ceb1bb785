# SPDX-License-Identifier: Apache-2.0
"""llama.cpp through llama-cpp-python's low-level interface, on the same weights as GGUF.

Runs in an environment of its own (`make bench-peers`), without torch.
"""

import os
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
from gguf_export import export
from workload import main


class LlamaCpp:
    """One context, as many sequences in it as a batch has prompts."""

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
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._threads = workload["threads"]
        self._vocab_size = workload["vocab_size"]

    def start(self, prompts: list[list[int]]) -> None:
        """See `Contestant`."""
        self.generate(prompts, 1)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """See `Contestant`."""
        length = len(prompts[0]) + num_tokens
        params = lib.llama_context_default_params()
        params.n_ctx = -(-length // 256) * 256 * len(prompts)
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = len(prompts)
        params.n_threads = params.n_threads_batch = self._threads
        context = lib.llama_init_from_model(self._model, params)
        batch = lib.llama_batch_init(max(512, len(prompts)), 0, 1)
        try:
            tokens = []
            for sequence, prompt in enumerate(prompts):
                for start in range(0, len(prompt), 512):
                    piece = prompt[start : start + 512]
                    is_last = start + 512 >= len(prompt)
                    rows = [
                        (t, start + i, sequence, is_last and i == len(piece) - 1)
                        for i, t in enumerate(piece)
                    ]
                    self._decode(context, batch, rows)
                tokens.append(self._likeliest(context, -1))
            for step in range(1, num_tokens):
                place = len(prompts[0]) + step - 1
                rows = [(token, place, sequence, True) for sequence, token in enumerate(tokens)]
                self._decode(context, batch, rows)
                tokens = [self._likeliest(context, row) for row in range(len(prompts))]
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
            raise RuntimeError(f"llama_decode failed with {code}")

    def _likeliest(self, context: object, row: int) -> int:
        logits = np.ctypeslib.as_array(
            lib.llama_get_logits_ith(context, row), shape=(self._vocab_size,)
        )
        return int(logits.argmax())


if __name__ == "__main__":
    main(LlamaCpp)
