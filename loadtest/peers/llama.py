"""llama.cpp as a compared engine, through the low-level interface of llama-cpp-python.

The program converts the checkpoint to GGUF. It runs in an environment of its own
(`make bench-peers`) without torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from loadtest.peers.workload import main

_BATCH = 512


class LlamaCpp:
    """A llama.cpp model. Each call creates a context with one sequence for each prompt."""

    def __init__(self, path: str, workload: dict[str, Any]) -> None:
        file = gguf_file(Path(path), workload["dtype"])
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


def gguf_file(checkpoint: Path, dtype: str) -> Path:
    """Return the GGUF file of a checkpoint, and create the file if it does not exist.

    The setting `gguf_type` of the contestant names the quantization, such as "Q4_0". Without this
    setting, the weights are not quantized. Another process creates the file, because the peak
    memory of this process is measured.
    """
    settings = json.loads(os.environ.get("BENCH_ENGINE", "{}"))
    kinds = [settings["gguf_type"]] if "gguf_type" in settings else []
    file = checkpoint / f"model-{'-'.join([dtype, *kinds])}.gguf"
    if not file.is_file():
        command = [sys.executable, "-m", "loadtest.peers.gguf_export"]
        arguments = [str(checkpoint), str(file), dtype, *kinds]
        subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
    return file


if __name__ == "__main__":
    main(LlamaCpp)
