# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the scheduler."""

from collections.abc import Sequence

from nereid_backend.core.grammar import Guide
from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.sampling_params import SamplingParams

# The step of SplitMix64's counter: odd, so that a request's sequences have seeds that all differ.
_SEED_STEP = 0x9E3779B97F4A7C15


class Request:
    """State of one sequence of a request; only the scheduler changes it.

        token_ids            prompt ........ | output ....
        num_computed_tokens  ============>                    their keys and values are in the cache
        draft_token_ids                           ....        guessed: what may come next
        block_table          [ 7 ][ 2 ][ 9 ]                  room for the first len * block_size

    A waiting request has no row and no blocks; a running one has both.

    Attributes:
        token_ids: prompt and output tokens in one list, output tokens appended as they come.
        num_prompt_tokens: how many of token_ids are the prompt.
        max_total_tokens: at this length of token_ids the request ends.
        stop_token_ids: tokens that end the request.
        seed: 64-bit seed of its random numbers.
        index: which of the request's n sequences.
        rank: its place in every order; the lowest is served first. Given by the scheduler.
        guide: what limits its next tokens; None is nothing. Its state is the sampler's business.
        draft_token_ids: tokens guessed to follow the last known one; they go through the model in
            this step and are kept as far as they turn out right.
        num_computed_tokens: how many of token_ids went through the model since it got its row, or
            were found in the cache then.
        num_reused_tokens: how many of these were found.
        num_cached_tokens: how many of the prompt's were found when it first got a row; None before.
        block_table: its blocks in order.
        num_dropped_blocks: how many of the first were given back, since nothing will look at them
            again; the null block stands for each in the table.
        block_digests: names of its full blocks, as far as they were asked for.
        num_findable_blocks: how many of its blocks the prefix cache has seen.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are known.
        was_reported: whether a token of it was reported.
        row: its place in the runner's tables while it runs.
    """

    __slots__ = (
        "block_digests",
        "block_table",
        "cumulative_logprob",
        "draft_token_ids",
        "guide",
        "index",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_dropped_blocks",
        "num_findable_blocks",
        "num_prompt_tokens",
        "num_reused_tokens",
        "params",
        "prompt_logprobs",
        "rank",
        "request_id",
        "row",
        "seed",
        "stop_token_ids",
        "token_ids",
        "was_reported",
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
        self.rank: tuple[int, ...] = ()
        self.guide: Guide | None = None
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = max_total_tokens
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids).union(eos)
        self.seed = seed
        self.cumulative_logprob = 0.0
        self.draft_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_reused_tokens = 0
        self.num_cached_tokens: int | None = None
        self.block_table: list[int] = []
        self.num_dropped_blocks = 0
        self.block_digests: list[bytes] = []
        self.num_findable_blocks = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.was_reported = False
        self.row: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be found out."""
        return (
            self.params.prompt_logprobs is not None
            and self.index == 0
            and len(self.token_ids) == self.num_prompt_tokens
        )

    def sequences(self) -> list["Request"]:
        """This sequence and the others of its request (params.n in all), which differ in seed."""
        others = []
        for index in range(1, self.params.n):
            other = Request(
                self.request_id,
                self.token_ids,
                self.params,
                max_total_tokens=self.max_total_tokens,
                seed=(self.seed + index * _SEED_STEP) % 2**64,
            )
            other.index = index
            other.stop_token_ids = self.stop_token_ids
            others.append(other)
        return [self, *others]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.index}, "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens"
            f", {self.num_computed_tokens} computed, {len(self.block_table)} blocks)"
        )


class Group:
    """A request as its caller sees it: sequences that share a prompt.

    One sequence computes the prompt while the others follow it; then the request is split: the
    others wait for rows of their own, and the group holds the prompt's blocks for them.

    Attributes:
        sequences: those that have not ended, by index.
        followers: those of them that have not had a row yet, but for the one that computes the
            prompt.
        is_split: whether the followers wait for rows and no longer for the prompt.
        is_prepared: whether its guide is there, or it needs none.
        block_table: blocks of the prompt, held until the last follower has its row.
    """

    __slots__ = ("block_table", "followers", "is_prepared", "is_split", "sequences")

    def __init__(self, sequences: Sequence[Request]) -> None:
        self.sequences = {sequence.index: sequence for sequence in sequences}
        self.followers = list(sequences[1:])
        self.is_split = False
        self.is_prepared = True
        self.block_table: list[int] = []
