# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the scheduler."""

from collections.abc import Sequence

from nereid_backend.core.guide import Guide
from nereid_backend.core.params import SamplingParams


class Request:
    """State of one sequence of a request; only the scheduler changes it.

        token_ids            prompt ........ | output ....
        num_computed_tokens  ============>                    their keys and values are in the cache
        block_table          [ 7 ][ 2 ][ 9 ]                  room for the first len * block_size

    A waiting request has no row and no blocks; a running one has both.

    Attributes:
        token_ids: prompt and output tokens in one list, output tokens appended as they come.
        num_prompt_tokens: how many of token_ids are the prompt.
        max_total_tokens: at this length of token_ids the request ends.
        stop_token_ids: tokens that end the request.
        seed: 64-bit seed of its random numbers.
        index: which of the request's n sequences.
        guide: what limits its next tokens; None is nothing. Its state is the sampler's business.
        num_computed_tokens: how many of token_ids went through the model since it got its row.
        block_table: its blocks in order.
        row: its place in the runner's tables while it runs.
    """

    __slots__ = (
        "block_table",
        "cumulative_logprob",
        "guide",
        "index",
        "max_total_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "params",
        "request_id",
        "row",
        "seed",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_total_tokens: int,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.request_id = request_id
        self.index = 0
        self.guide: Guide | None = None
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = max_total_tokens
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids).union(eos)
        self.seed = seed
        self.cumulative_logprob = 0.0
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.row: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens"
            f", {self.num_computed_tokens} computed, {len(self.block_table)} blocks)"
        )
