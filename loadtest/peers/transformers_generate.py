"""A program that measures `generate` of transformers, which uses static batches.

All prompts of a batch have the same length, so that no padding is needed.
"""

import torch
from transformers import AutoModelForCausalLM

from loadtest.peers.workload import Peer, Prompts, Settings, Workload, main


class Generate(Peer):
    """A model of transformers with default settings."""

    def __init__(self, path: str, workload: Workload, settings: Settings) -> None:
        del settings
        torch.set_num_threads(workload.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, workload.dtype)
        )
        if torch.cuda.is_available():
            self._model.to("cuda")

    @torch.inference_mode()
    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        input_ids = torch.tensor(prompts, device=self._model.device)
        token_ids = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert token_ids.shape[1] == input_ids.shape[1] + num_tokens


if __name__ == "__main__":
    main(Generate)
