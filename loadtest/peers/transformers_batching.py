"""A program that measures the continuous batching of transformers, which `generate_batch` uses.

`generate_batch` creates a new KV cache for each batch. The program instead uses one manager with
one KV cache for all batches, as a service would. The cache is as large as the largest batch
requires, because a cache of the default size would use most of the memory.
"""

import math

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from loadtest.peers.workload import Peer, Prompts, Settings, Workload, main

_PAGE_TOKENS = 32
_MIN_STEP_TOKENS = 512
_TIMEOUT_S = 600.0


class GenerateBatch(Peer):
    """A model of transformers, and the running manager that batches requests for the model."""

    def __init__(self, path: str, workload: Workload, settings: Settings) -> None:
        del settings  # this peer has no settings of its own
        torch.set_num_threads(workload.threads)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, workload.dtype), attn_implementation="sdpa"
        )
        if torch.cuda.is_available():
            model.to("cuda")
        self._manager = model.init_continuous_batching(
            # No token has the id -1, so every answer has its full length.
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=_num_pages(workload),
                max_batch_tokens=max([_MIN_STEP_TOKENS, *workload.decode]),
            ),
        )
        self._manager.warmup()
        self._manager.start()

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        waiting = set(self._manager.add_requests(prompts, max_new_tokens=num_tokens))
        assert len(waiting) == len(prompts)
        while waiting:
            output = self._manager.get_result(timeout=_TIMEOUT_S)
            assert output is not None, f"generate_batch did not answer within {_TIMEOUT_S:.0f} s"
            assert output.error is None, f"generate_batch failed: {output.error}"
            assert len(output.generated_tokens) == num_tokens
            waiting.remove(output.request_id)

    def close(self) -> None:
        """Stop the manager's thread, because it would keep the program running."""
        self._manager.stop(block=True, timeout=10)


def _num_pages(workload: Workload) -> int:
    """Return the number of cache pages that the largest batch or the longest prompt needs.

    One spare page is added.
    """
    sequence_pages = _pages_of(workload.context + workload.answer)
    batch_pages = max([1, *workload.decode]) * sequence_pages
    longest_prompt = max([workload.context, *workload.prefill])
    return max(batch_pages, _pages_of(longest_prompt + workload.answer)) + 1


def _pages_of(num_tokens: int) -> int:
    """Return the number of pages of a sequence, with one spare page."""
    return math.ceil(num_tokens / _PAGE_TOKENS) + 1


if __name__ == "__main__":
    main(GenerateBatch)
