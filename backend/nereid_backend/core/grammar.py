# SPDX-License-Identifier: Apache-2.0
"""What limits a sequence's next tokens: how a request says it, and what the engine needs of it.

The core only carries guides; `nereid_backend.grammar` makes them and the sampler asks them.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple, Protocol, Self

from nereid_backend.errors import RequestError

KINDS = ("structural_tag", "json_schema", "regex", "ebnf", "choice")


class GrammarSpec(NamedTuple):
    """A grammar as text. Equal ones are compiled once.

    Attributes:
        kind: one of KINDS.
        source: JSON of the structural tag or the schema; the regex; the EBNF; a JSON list of
            strings.
        after: the grammar begins behind the first occurrence of this text in the answer, blanks
            behind it skipped (where reasoning ends); empty: with the answer's first token.
    """

    kind: str
    source: str
    after: str = ""

    @classmethod
    def of(cls, fields: Iterable[object]) -> Self:
        """From a spec or from its fields in a list, as a wire brings them.

        Raises:
            RequestError: it is none.
        """
        values = tuple(fields) if isinstance(fields, list | tuple) else (fields,)
        if len(values) not in (2, 3) or not all(isinstance(value, str) for value in values):
            raise RequestError(f"grammar: must be a kind, a source and a text, got {values!r}")
        spec = cls(*values)
        if spec.kind not in KINDS:
            known = ", ".join(KINDS)
            raise RequestError(f"grammar: kind must be one of {known}, got {spec.kind!r}")
        return spec

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Self:
        """One of these strings."""
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))


class ThinkingSpec(NamedTuple):
    """How a request's reasoning is delimited, and how long it may be.

    Attributes:
        start: text that opens reasoning when the model writes it; empty if it never does.
        end: text that closes it.
        end_token_ids: what is forced when the budget is used up: the end marker's token ids, and
            whatever the format writes around them.
        is_open: whether the prompt has opened reasoning and not closed it.
        budget: at most so many tokens of reasoning; None is no limit.
    """

    start: str
    end: str
    end_token_ids: tuple[int, ...] = ()
    is_open: bool = False
    budget: int | None = None

    @classmethod
    def of(cls, fields: Iterable[object]) -> Self:
        """From a spec or from its fields in a list, as a wire brings them.

        Raises:
            RequestError: it is none.
        """
        values = tuple(fields) if isinstance(fields, list | tuple) else (fields,)
        match values:
            case (str(start), str(end), list() | tuple() as token_ids, bool(is_open), budget) if (
                all(type(token_id) is int for token_id in token_ids)
                and (budget is None or (type(budget) is int and budget >= 0))
            ):
                return cls(start, end, tuple(token_ids), is_open, budget)
        raise RequestError(
            "thinking: must be two texts, token ids, whether it is open and a budget of at least "
            f"0 or none, got {values!r}"
        )


class Guide(Protocol):
    """The state of one sequence under its grammar and its thinking budget.

    Used by the engine's thread, and by the thread that fills masks while the engine waits for it.
    """

    def accept(self, token_ids: list[int]) -> None:
        """Take in tokens of the answer, in order.

        Raises:
            EngineError: one of them is not allowed here.
        """

    def fork(self) -> "Guide":
        """A guide for another sequence that starts where this one stands."""
