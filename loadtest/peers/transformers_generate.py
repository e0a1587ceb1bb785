# SPDX-License-Identifier: Apache-2.0
"""transformers' `generate` with a static batch: all prompts of one length, so nothing is padded.

Requests that arrive at their own times are answered as a service around `generate` can: all that
wait are the next batch, padded on the left, and nobody joins it.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from loadtest.peers.workload import main, summary


class _Clock(StoppingCriteria):
    """Notes when the first tokens are there, and stops nothing."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if self.first is None:
            self.first = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


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

    def mixed(self, plan: list[tuple[float, list[int], int]]) -> dict[str, Any]:
        """Requests at their times; seconds to first tokens and the rate."""
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
        """Answer prompts of different lengths; returns when the first tokens were there."""
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
