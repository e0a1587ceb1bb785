# SPDX-License-Identifier: Apache-2.0
"""What an answer must match: grammars, reasoning gates and thinking budgets, as token masks.

    spec.py, validate.py    light: what the server's stubs need; no torch, no grammar backend
    guides.py               START HERE: Guides.prepare gives a request its Guide
    guide.py                the state of one sequence: gate, thinking, grammar, end
    thinking.py             where reasoning begins and ends, and its budget
    backend.py              the interface of a grammar backend, and its two implementations
    cost.py                 what would take too long to compile, told before it is tried
    pool.py                 compiling off the engine's thread, with a time limit and a cache
    vocabulary.py           the bytes of every token

This module imports nothing heavy: `Guides` is loaded when it is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nereid_backend.grammar.guide_factory import Guides

__all__ = ["Guides"]


def __getattr__(name: str) -> object:
    if name == "Guides":
        from nereid_backend.grammar.guide_factory import Guides

        return Guides
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
