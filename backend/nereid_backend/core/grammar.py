# SPDX-License-Identifier: Apache-2.0
"""Grammars and reasoning budgets of requests, and the interface that applies both.

A guide stores which tokens the grammar and the thinking budget of one sequence allow next. The
package `nereid_backend.grammar` creates guides, and the sampler uses them. The core never looks
into a guide.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple, Protocol, Self

from nereid_backend.errors import RequestError

KINDS = ("structural_tag", "json_schema", "regex", "ebnf", "choice")


class GrammarSpec(NamedTuple):
    """A grammar in text form, as a request specifies it.

    Requests with equal specifications share one compiled grammar.

    Attributes:
        kind: one of `KINDS`.
        source: depending on the kind: the JSON text of a structural tag, the JSON text of a schema,
            a regular expression, an EBNF grammar, or a JSON list of strings.
        after: a text such as "</think>". The grammar applies only to the part of the answer that
            follows this text and any white space after it. If `after` is empty, the grammar applies
            to the whole answer.
    """

    kind: str
    source: str
    after: str = ""

    @classmethod
    def of(cls, fields: Iterable[object]) -> Self:
        """Create a specification from the list of fields that another process has sent.

        Example: ["regex", "[0-9]+"] gives GrammarSpec(kind="regex", source="[0-9]+", after="").

        Raises:
            RequestError: if the fields are not a valid specification.
        """
        values = tuple(fields) if isinstance(fields, list | tuple) else (fields,)
        if len(values) not in (2, 3) or not all(isinstance(value, str) for value in values):
            raise RequestError(
                "grammar: the value must be a list of two or three strings (kind, source, after), "
                f"but it is {values!r}."
            )
        spec = cls(*values)
        if spec.kind not in KINDS:
            known = ", ".join(KINDS)
            raise RequestError(
                f"grammar: the kind must be one of {known}, but it is {spec.kind!r}."
            )
        return spec

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Self:
        """Return the specification of a grammar whose only answers are `choices`.

        Example: ["yes", "no"] gives GrammarSpec(kind="choice", source='["yes", "no"]', after="").
        """
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))


class ThinkingSpec(NamedTuple):
    """The delimiters and the token budget of a request's reasoning.

    Attributes:
        start: the marker with which the model opens reasoning; empty if the model never opens
            reasoning itself.
        end: the marker that closes reasoning.
        end_token_ids: the tokens that are forced when the budget is used up. They contain the end
            marker and the text that the chat format puts before and after the marker.
        is_open: whether the prompt ends inside reasoning.
        budget: the largest number of reasoning tokens; None means no limit.
    """

    start: str
    end: str
    end_token_ids: tuple[int, ...] = ()
    is_open: bool = False
    budget: int | None = None

    @classmethod
    def of(cls, fields: Iterable[object]) -> Self:
        """Create a specification from the list of fields that another process has sent.

        Example: ["<think>", "</think>", [7], True, 100] means that the prompt ends inside
        reasoning, and that token 7 is forced after 100 reasoning tokens.

        Raises:
            RequestError: if the fields are not a valid specification.
        """
        values = tuple(fields) if isinstance(fields, list | tuple) else (fields,)
        match values:
            case (str(start), str(end), list() | tuple() as token_ids, bool(is_open), budget) if (
                all(type(token_id) is int for token_id in token_ids)
                and (budget is None or (type(budget) is int and budget >= 0))
            ):
                return cls(start, end, tuple(token_ids), is_open, budget)
        raise RequestError(
            "thinking: the value must be a list of start marker, end marker, token ids, a boolean "
            f"and a budget (an integer of at least 0, or null), but it is {values!r}."
        )


class Guide(Protocol):
    """The tokens that may come next in one sequence, according to its grammar and reasoning budget.

    A guide applies the grammar and the thinking budget of the request, and it advances with each
    token of the answer.

    The thread that calls the engine uses a guide. While that thread waits for masks, the threads
    that fill masks use the guide instead, so no two threads use a guide at the same time.
    """

    def accept(self, token_ids: list[int]) -> None:
        """Advance the state of the grammar by new tokens of the answer.

        Args:
            token_ids: the new tokens, in order.

        Raises:
            EngineError: if the grammar does not allow one of the tokens.
        """

    def fork(self) -> "Guide":
        """Return an independent copy of this guide for another sequence."""
