# SPDX-License-Identifier: Apache-2.0
"""transformers' `generate` with a static batch: all prompts of one length, so nothing is padded."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from workload import main


class Generate:
    """The model as a user loads it."""

    def __init__(self, path: str, workload: dict[str, Any]) -> None:
        torch.set_num_threads(workload["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, workload["dtype"])
        )
        if torch.cuda.is_available():
            self._model.to("cuda")

    def start(self, prompts: list[list[int]]) -> None:
        """See `Contestant`."""
        self.generate(prompts, 1)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """See `Contestant`."""
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
