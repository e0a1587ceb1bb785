"""`generate` of transformers with static batches, as a compared engine.

All prompts of a batch have the same length, so that no padding is needed.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from loadtest.peers.workload import main


class Generate:
    """A model with default settings."""

    def __init__(self, path: str, workload: dict[str, Any]) -> None:
        torch.set_num_threads(workload["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, workload["dtype"])
        )
        if torch.cuda.is_available():
            self._model.to("cuda")

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        ids = torch.tensor(prompts, device=self._model.device)
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert found.shape[1] == ids.shape[1] + num_tokens


if __name__ == "__main__":
    main(Generate)
