# SPDX-License-Identifier: Apache-2.0
"""The continuous batching of transformers, which `generate_batch` uses, as a compared engine.

The program keeps the manager of `generate_batch` between batches, as a service would, because
`generate_batch` creates a new cache for each batch. The cache has the size of the largest batch,
because its default size is most of the memory.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from loadtest.peers.workload import main, summary

_PAGE = 32
_BATCH_TOKENS = 512
_TIMEOUT_S = 600.0


class GenerateBatch:
    """A model with default settings, and its running manager of continuous batching."""

    def __init__(self, path: str, workload: dict[str, Any]) -> None:
        torch.set_num_threads(workload["threads"])
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, workload["dtype"]), attn_implementation="sdpa"
        )
        if torch.cuda.is_available():
            model.to("cuda")
        mixed = workload["mixed"] or {"requests": 0}
        most = max([1, *workload["decode"], mixed["requests"]])
        longest = max([workload["context"], *workload["prefill"]]) + workload["answer"]
        pages = -(-(workload["context"] + workload["answer"]) // _PAGE) + 1
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=_PAGE,
                num_blocks=max(most * pages, -(-longest // _PAGE) + 1) + 1,
                max_batch_tokens=max(_BATCH_TOKENS, most),
            ),
        )
        self._manager.warmup()
        self._manager.start()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        waiting = set(self._manager.add_requests(prompts, max_new_tokens=num_tokens))
        assert len(waiting) == len(prompts)
        while waiting:
            output = self._result(_TIMEOUT_S)
            assert output is not None, f"generate_batch did not answer within {_TIMEOUT_S:.0f} s"
            assert len(output.generated_tokens) == num_tokens
            waiting.remove(output.request_id)

    def mixed(self, plan: list[tuple[float, list[int], int]]) -> dict[str, Any]:
        """Run requests at their arrival times; return the percentiles of TTFT and the tokens/s."""
        started, first, waiting = time.perf_counter(), {}, list(enumerate(plan))
        running: set[str] = set()
        while waiting or running:
            now = time.perf_counter() - started
            if waiting and waiting[0][1][0] <= now:
                number, (_, prompt, num_tokens) = waiting.pop(0)
                running.add(str(number))
                self._manager.add_request(
                    prompt, str(number), max_new_tokens=num_tokens, streaming=True
                )
                continue
            output = self._result(max(0.0, waiting[0][1][0] - now) if waiting else _TIMEOUT_S)
            if output is None:
                assert waiting, f"generate_batch did not answer within {_TIMEOUT_S:.0f} s"
                continue
            first.setdefault(output.request_id, time.perf_counter() - started)
            if output.is_finished():
                running.remove(output.request_id)
        waits = [first[str(number)] - at for number, (at, *_) in enumerate(plan)]
        total = sum(num_tokens for *_, num_tokens in plan)
        return summary(waits, total, time.perf_counter() - started)

    def close(self) -> None:
        """Stop the manager's thread, because it would keep the program running."""
        self._manager.stop(block=True, timeout=10)

    def _result(self, timeout_s: float) -> Any:  # noqa: ANN401 - transformers' GenerationOutput
        """Return the next result of any request, or None after the timeout."""
        output = self._manager.get_result(timeout=timeout_s)
        assert output is None or output.error is None, f"generate_batch failed: {output.error}"
        return output


if __name__ == "__main__":
    main(GenerateBatch)
