# SPDX-License-Identifier: Apache-2.0
"""`generate` of transformers with static batches, as a compared engine.

All prompts of a batch have the same length, so that no padding is needed. Requests that arrive at
different times are answered as in a service based on `generate`: all waiting requests form the next
batch, which is padded on the left, and no request joins a running batch.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from loadtest.peers.workload import main, summary


class _Clock(StoppingCriteria):
    """A stopping criterion that stores the time of the first tokens, and never stops a sequence."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if self.first is None:
            self.first = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


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

    def mixed(self, plan: list[tuple[float, list[int], int]]) -> dict[str, Any]:
        """Run requests at their arrival times; return the percentiles of TTFT and the tokens/s."""
        started, waits, waiting = time.perf_counter(), [], list(plan)
        while waiting:
            now = time.perf_counter() - started
            batch = [request for request in waiting if request[0] <= now]
            if not batch:
                time.sleep(waiting[0][0] - now)
                continue
            del waiting[: len(batch)]
            first = self._answer([prompt for _, prompt, _ in batch], max(n for *_, n in batch))
            waits += [first - started - at for at, _, _ in batch]
        total = sum(num_tokens for *_, num_tokens in plan)
        return summary(waits, total, time.perf_counter() - started)

    @torch.inference_mode()
    def _answer(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Answer prompts of different lengths, and return the time of the first tokens."""
        width, device, clock = max(map(len, prompts)), self._model.device, _Clock()
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        assert clock.first is not None
        return clock.first


if __name__ == "__main__":
    main(Generate)
