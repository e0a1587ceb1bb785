# SPDX-License-Identifier: Apache-2.0
"""transformers' own continuous batching, `generate_batch`.

Its cache is sized for the workload: by default it takes most of the memory, which on a CPU costs
seconds to clear before each batch.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from workload import main

_PAGE = 32


class GenerateBatch:
    """The model as a user loads it."""

    def __init__(self, path: str, workload: dict[str, Any]) -> None:
        torch.set_num_threads(workload["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, workload["dtype"]), attn_implementation="sdpa"
        )
        if torch.cuda.is_available():
            self._model.to("cuda")

    def start(self, prompts: list[list[int]]) -> None:
        """See `Contestant`."""
        self.generate(prompts, 1)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """See `Contestant`."""
        config = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        length = len(prompts[0]) + num_tokens
        batching = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=(-(-length // _PAGE) + 1) * len(prompts) + 1,
            max_batch_tokens=max(512, len(prompts)),
        )
        found = self._model.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        errors = {output.error for output in found.values()} - {None}
        assert not errors, f"generate_batch failed: {errors}"
        lengths = {len(output.generated_tokens) for output in found.values()}
        assert lengths == {num_tokens}, f"answers have {lengths} tokens, not {num_tokens}"


if __name__ == "__main__":
    main(GenerateBatch)
