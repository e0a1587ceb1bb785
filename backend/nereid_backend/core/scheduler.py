# SPDX-License-Identifier: Apache-2.0
"""Which tokens go through the model next.

There is no prefill phase and no decode phase. A request has tokens that are known (its prompt, then
what was sampled) and tokens that are computed (their keys and values are in the cache). Each step
gives every request some of the tokens that it still has to compute, under one budget; when none is
left to compute after the last known token, a new one is sampled. A long prompt is thereby cut into
chunks that share steps with requests that add one token each, and a preempted request is one that
has everything to compute again.

Order: running requests go first, in the order in which they were admitted; then waiting ones, first
come first served. When blocks run out, the request that was admitted last gives its blocks back and
waits at the head of the queue. The oldest one is never preempted for another, so it ends, then the
next becomes the oldest: nobody starves.
"""

from collections import deque

from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.outputs import FinishReason, RequestUpdate
from nereid_backend.core.request import Request
from nereid_backend.core.step import Chunk, Sampled, StepPlan, StepResult


class Scheduler:
    """Owns every request that was accepted and has not ended, and the pool of blocks.

    Not thread-safe: one thread plans and commits.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.pool = pool
        self.num_preemptions = 0
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._ended: list[RequestUpdate] = []

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this name is in work, or its end is still to be reported."""
        return request_id in self._requests or any(
            update.request_id == request_id for update in self._ended
        )

    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._requests or self._ended)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue. Its id is new and it fits the pool when alone."""
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request at once; the next commit reports it. Unknown ones are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._ended.append(self._end(request, [], "abort"))

    def plan(self) -> StepPlan:
        """Choose the next step's tokens and give their requests rows and blocks."""
        chunks: list[Chunk] = []
        budget = self._plan_running(chunks, self._max_num_batched_tokens)
        budget = self._plan_waiting(chunks, budget)
        chunks.sort(key=_has_many_tokens)
        return StepPlan(chunks, self._max_num_batched_tokens - budget)

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in what a plan's step brought and report what is new, ended requests included."""
        updates, self._ended = self._ended, []
        sampled = iter(result.sampled)
        for chunk in plan.chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens
            if chunk.samples:
                updates.append(self._take(chunk.request, next(sampled)))
        return updates

    def fail(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """End every request of a plan whose step failed, and report that."""
        updates, self._ended = self._ended, []
        updates += [self._end(chunk.request, [], "error", error=error) for chunk in plan.chunks]
        return updates

    def check(self) -> None:
        """Verify the pool against the block tables, and the rows.

        Raises:
            AssertionError: something leaked.
        """
        self.pool.check(request.block_table for request in self._running)
        rows = [request.row for request in self._running if request.row is not None]
        assert len(rows) == len(self._running), "a running request has no row"
        assert sorted(rows + self._free_rows) == list(range(self._max_num_seqs)), "rows leaked"
        assert all(r.row is None and not r.block_table for r in self._waiting)
        assert len(self._requests) == len(self._running) + len(self._waiting)

    def _plan_running(self, chunks: list[Chunk], budget: int) -> int:
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            start = request.num_computed_tokens
            num_tokens = len(request.token_ids) - start
            samples = num_tokens <= budget
            if not samples:
                num_tokens = budget
            missing = self._num_blocks(start + num_tokens) - len(request.block_table)
            if missing > 0:
                if not self._make_room(request, missing):
                    break
                request.block_table += self.pool.allocate(missing)
            chunks.append(Chunk(request, start, num_tokens, samples, False, int(samples)))
            budget -= num_tokens
            index += 1
        return budget

    def _plan_waiting(self, chunks: list[Chunk], budget: int) -> int:
        # A request gets blocks for all its known tokens at once: two half-admitted prompts could
        # otherwise wait for each other's blocks.
        while self._waiting and self._free_rows and budget > 0:
            request = self._waiting[0]
            num_known = len(request.token_ids)
            num_blocks = self._num_blocks(num_known)
            if num_blocks > self.pool.num_free:
                break
            self._waiting.popleft()
            request.row = self._free_rows.pop()
            request.block_table = self.pool.allocate(num_blocks)
            self._running.append(request)
            num_tokens = min(num_known, budget)
            samples = num_tokens == num_known
            chunks.append(Chunk(request, 0, num_tokens, samples, True, int(samples)))
            budget -= num_tokens
        return budget

    def _make_room(self, request: Request, num_blocks: int) -> bool:
        """Preempt from the newest on until there is room; False if that reached the request itself.

        All who give way come after the request in running order, so none of them has a chunk in the
        plan being made.
        """
        while self.pool.num_free < num_blocks:
            newest = self._running.pop()
            self._release(newest)
            newest.num_computed_tokens = 0
            self._waiting.appendleft(newest)
            self.num_preemptions += 1
            if newest is request:
                return False
        return True

    def _take(self, request: Request, sampled: Sampled) -> RequestUpdate:
        """Append sampled tokens up to the first that ends the request."""
        if sampled.error is not None:
            return self._end(request, [], "error", error=sampled.error)
        new_token_ids: list[int] = []
        for token_id, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
            new_token_ids.append(token_id)
            request.token_ids.append(token_id)
            request.cumulative_logprob += logprob
            if token_id in request.stop_token_ids:
                return self._end(request, new_token_ids, "stop", stop_reason=token_id)
            if len(request.token_ids) >= request.max_total_tokens:
                return self._end(request, new_token_ids, "length")
        return RequestUpdate(
            request.request_id, new_token_ids, cumulative_logprob=request.cumulative_logprob
        )

    def _end(
        self,
        request: Request,
        new_token_ids: list[int],
        reason: FinishReason,
        *,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> RequestUpdate:
        del self._requests[request.request_id]
        if request.row is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)
        return RequestUpdate(
            request.request_id,
            new_token_ids,
            reason,
            stop_reason,
            request.cumulative_logprob,
            error,
        )

    def _release(self, request: Request) -> None:
        assert request.row is not None
        self._free_rows.append(request.row)
        request.row = None
        self.pool.release(request.block_table)
        request.block_table = []

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _has_many_tokens(chunk: Chunk) -> bool:
    return chunk.num_tokens > 1
