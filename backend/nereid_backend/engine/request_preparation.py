# SPDX-License-Identifier: Apache-2.0
"""Prepares new requests: compiles their grammars, and reads their cached prefixes from disk."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from nereid_backend.config import EngineConfig
from nereid_backend.core.outputs import EngineInfo
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.engine.disk_tier import DiskTier
from nereid_backend.errors import CapacityError, RequestError

if TYPE_CHECKING:
    from nereid_backend.grammar import Guides

# The longest time that `wait` blocks, in seconds. The time is short, because the engine receives no
# new requests while `wait` blocks.
_GUIDE_WAIT_S = 0.02


class _Compilation(NamedTuple):
    """The compilation of a grammar for a request that has not used the grammar yet.

    Attributes:
        guide: the future of the guide, which applies the grammar to the tokens.
        start_time: the time at which the compilation was started, by time.monotonic().
    """

    guide: Future[Any]
    start_time: float


class RequestPreparation:
    """The requests that wait for a compiled grammar or for cached blocks from disk.

    Other threads compile the grammars and read the files. The scheduler starts a request only
    after its preparation.

    Attributes:
        compiled: one triple for each request whose grammar compilation the last call of
            `start_prepared` has found finished: the request id, the time at which the compilation
            was started, and the time of this call. Both times are by time.monotonic().
    """

    def __init__(
        self, config: EngineConfig, info: EngineInfo, scheduler: Scheduler, disk: DiskTier | None
    ) -> None:
        """Create an object that compiles the grammars of requests, and reads their cached prefixes.

        Args:
            config: the settings of the grammar library.
            info: the facts about the model that grammars depend on.
            scheduler: receives the requests.
            disk: reads cached prefixes; None if there is no prefix cache on disk.
        """
        # Each finished compilation has one entry: the request id, the start time and the end time.
        self.compiled: list[tuple[str, float, float]] = []
        self._config = config
        self._info = info
        self._scheduler = scheduler
        self._disk = disk
        self._guides: Guides | None = None
        self._compilations: dict[str, _Compilation] = {}  # by request id

    @property
    def has_guides(self) -> bool:
        """Whether the grammar libraries are loaded."""
        return self._guides is not None

    def add(self, sequence: Sequence) -> None:
        """Add a request to the scheduler, and start to prepare the request.

        `sequence` is the first sequence of the request.

        Raises:
            CapacityError: if too many grammars are waiting to be compiled.
        """
        needs_guide = _needs_guide(sequence.params)
        if needs_guide:
            future = self._load_guides().prepare(sequence.params, sequence.stop_token_ids)
            _raise_capacity_error(future)
            self._compilations[sequence.request_id] = _Compilation(future, time.monotonic())
        is_reading = self._disk is not None and self._disk.start_reading(sequence)
        self._scheduler.add(sequence, is_prepared=not (needs_guide or is_reading))

    def cancel(self, request_id: str) -> None:
        """Stop the preparation of a request. Do nothing if the request is not being prepared."""
        if request_id in self._compilations:
            self._compilations.pop(request_id).guide.cancel()
        if self._disk is not None:
            self._disk.cancel(request_id)

    def start_prepared(self) -> None:
        """Start the requests whose preparation has ended. End the requests with an invalid grammar.

        A request with a grammar is prepared when its grammar has been compiled. A request without a
        grammar is prepared when its cached prefix has been read from disk. If reading takes too
        long, the request starts without the rest of the prefix.
        """
        if self._disk is not None:
            for request_id in self._disk.take_ready():
                if request_id not in self._compilations:
                    self._scheduler.start(request_id, None)
        self.compiled = self._start_after_compiling()

    def _start_after_compiling(self) -> list[tuple[str, float, float]]:
        """Start or end each request whose grammar compilation has finished.

        Return the request id, the start time and the end time of each compilation.
        """
        compiled = []
        for request_id, compilation in list(self._compilations.items()):
            if compilation.guide.done():
                del self._compilations[request_id]
                compiled.append((request_id, compilation.start_time, time.monotonic()))
                self._start_or_end(request_id, compilation.guide)
        return compiled

    def _start_or_end(self, request_id: str, guide: Future[Any]) -> None:
        """Start a request whose grammar was compiled. End it if the compilation has failed."""
        if self._disk is not None:
            # The request starts now, even if only a part of its prefix has been read from disk.
            self._disk.finish_reading(request_id)
        error = guide.exception()
        if error is None:
            self._scheduler.start(request_id, guide.result())
        else:
            # A RequestError means that the grammar is invalid, so the client has caused the error.
            # Any other error is a failure of the server.
            is_refused = isinstance(error, RequestError)
            self._scheduler.end_with_error(request_id, str(error), is_refused=is_refused)

    def wait(self) -> None:
        """Wait until a prefix has been read or a grammar has been compiled.

        Return after `_GUIDE_WAIT_S` seconds even if nothing has been read or compiled.
        """
        if self._disk is None or not self._disk.wait(_GUIDE_WAIT_S):
            futures = [compilation.guide for compilation in self._compilations.values()]
            if futures:
                wait(futures, timeout=_GUIDE_WAIT_S, return_when=FIRST_COMPLETED)

    def warm_up(self) -> None:
        """Load the grammar libraries in the background."""
        self._load_guides().warm_up()

    def close(self) -> None:
        """Stop the threads that compile grammars."""
        if self._guides is not None:
            self._guides.close()

    def _load_guides(self) -> "Guides":
        """Return the object that compiles the grammars of requests. The first call creates it."""
        if self._guides is None:
            # The grammar libraries take seconds to import, so they are imported only when a request
            # needs a grammar.
            from nereid_backend.grammar import Guides

            config = self._config
            self._guides = Guides(
                config.model,
                vocab_size=self._info.vocab_size,
                eos_token_ids=self._info.eos_token_ids,
                num_threads=config.grammar_threads,
                timeout_s=config.grammar_timeout,
                cache_bytes=config.grammar_cache_bytes,
                max_source_bytes=config.max_grammar_bytes,
            )
        return self._guides


def _raise_capacity_error(guide: Future[Any]) -> None:
    """Raise the CapacityError of a guide whose compilation was refused.

    A compilation is refused immediately if too many guides are waiting to be compiled. If the
    compilation was not refused, do nothing.
    """
    if guide.done():
        error = guide.exception()
        if isinstance(error, CapacityError):
            raise error


def _needs_guide(params: SamplingParams) -> bool:
    """Return whether a request has a grammar or a thinking budget."""
    has_budget = params.thinking is not None and params.thinking.budget is not None
    return has_budget or params.grammar is not None
