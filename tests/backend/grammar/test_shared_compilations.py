"""Tests that requests with equal grammars share one compilation.

The compilation ends if all its requests are cancelled.
"""

import threading
from concurrent.futures import Future

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.grammar.shared_compilations import SharedCompilations

SPEC = GrammarSpec("regex", "a")


class LockWithCallback:
    """A lock that calls a function once, immediately after the lock was released."""

    def __init__(self, callback):
        self._lock, self._callback = threading.Lock(), callback

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *exception):
        self._lock.release()
        callback, self._callback = self._callback, lambda: None
        callback()


def test_a_compilation_ends_when_its_last_request_is_cancelled():
    compilations, compilation = SharedCompilations(), Future()
    requests = [Future(), Future()]
    for request in requests:
        assert compilations.join(SPEC, request, lambda: compilation) is compilation
    requests[0].cancel()
    assert not compilation.cancelled()
    requests[1].cancel()
    assert compilation.cancelled()


def test_a_request_never_joins_a_compilation_that_is_being_cancelled():
    compilations, cancelled_one, new_one = SharedCompilations(), Future(), Future()
    first_request = Future()
    compilations.join(SPEC, first_request, lambda: cancelled_one)
    joined = []

    def send_another_request():
        joined.append(compilations.join(SPEC, Future(), lambda: new_one))

    # The other request arrives while the cancellation of the first request is being handled.
    compilations._lock = LockWithCallback(send_another_request)
    first_request.cancel()
    assert cancelled_one.cancelled()
    assert joined == [new_one]
