"""Lets clients start requests in turn, so that one client cannot delay the other clients."""

import asyncio
from collections import deque

_STARTS_PER_ITERATION = 4


class RequestTurns:
    """Starts a few requests in each iteration of the event loop. The clients take turns.

    In each iteration, the event loop runs all tasks that are ready before it reads from sockets.
    The frontend needs about 3 ms to parse and validate a request and to send it to the Triton
    server. Without turns, 500 requests that arrive together would run in the same iteration, and
    a request that arrives a moment later would wait for 1.5 s.

    The event loop does not idle while requests wait, so turns cost no throughput.

    Example: the requests a1 to a9 of client A wait when b1 of client B arrives. The requests start
    in the order a1, b1, a2, a3, and so on.
    """

    def __init__(self) -> None:
        self._num_starts = 0
        # Maps a client to its waiting requests. The first client in this dict has the next turn.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def wait(self, client: str) -> None:
        """Wait until `client` may start a request. Do not wait if no other request is waiting."""
        loop = asyncio.get_running_loop()
        if not self._waiting and self._num_starts < _STARTS_PER_ITERATION:
            if not self._num_starts:
                loop.call_soon(self._next_iteration)
            self._num_starts += 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _next_iteration(self) -> None:
        """Start the next requests. The event loop calls this method once in each iteration."""
        self._num_starts = 0
        while self._waiting and self._num_starts < _STARTS_PER_ITERATION:
            turn = self._pop_turn()
            if not turn.done():  # a cancelled request needs no turn
                turn.set_result(None)
                self._num_starts += 1
        if self._num_starts:
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _pop_turn(self) -> asyncio.Future[None]:
        """Remove the next waiting request, and return the future that this request awaits.

        The client of this request moves to the end of the order.
        """
        client = next(iter(self._waiting))  # the first client in the dict
        turns = self._waiting.pop(client)
        turn = turns.popleft()
        if turns:
            self._waiting[client] = turns
        return turn
