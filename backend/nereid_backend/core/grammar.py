# SPDX-License-Identifier: Apache-2.0
"""The grammar and the thinking budget of a request, and the interface that applies them.

A guide limits the next tokens of one sequence to those that the grammar and the thinking budget
allow. The package `nereid_backend.grammar` creates guides, and the sampler uses them. The core only
stores and copies guides.
"""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, Self

from nereid_backend.errors import RequestError

KINDS = ("structural_tag", "json_schema", "regex", "ebnf", "choice")


class GrammarSpec(NamedTuple):
    """The grammar of a request, as a text.

    Requests with equal specifications share one compiled grammar.

    Attributes:
        kind: one of `KINDS`.
        source: the text of the grammar. Depending on `kind`, the text is a structural tag in JSON,
            a JSON schema, a regular expression, an EBNF grammar, or a JSON list of strings.
        after: a text such as "</think>". The grammar applies only to the answer after this text.
            White space that directly follows this text is ignored. If `after` is empty, the grammar
            applies to the whole answer.
    """

    kind: str
    source: str
    after: str = ""

    @classmethod
    def from_fields(cls, fields: Iterable[object]) -> Self:
        """Create a specification from a list of fields that another process has sent.

        Example: ["regex", "[0-9]+"] gives GrammarSpec(kind="regex", source="[0-9]+", after=""). The
        optional third field is a text such as "</think>". The grammar then applies only to the part
        of the answer after this text.

        Raises:
            RequestError: if the fields are not a valid specification.
        """
        values = _as_tuple(fields)
        are_strings = all(isinstance(value, str) for value in values)
        if len(values) not in (2, 3) or not are_strings:
            raise RequestError(
                "grammar: the value must be a list of two or three strings (kind, source, after), "
                f"but it is {values!r}."
            )
        spec = cls(*values)
        if spec.kind not in KINDS:
            known_kinds = ", ".join(KINDS)
            raise RequestError(
                f"grammar: the kind must be one of {known_kinds}, but it is {spec.kind!r}."
            )
        return spec

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Self:
        """Return the specification of a grammar that allows only the answers in `choices`.

        Example: ["yes", "no"] gives GrammarSpec(kind="choice", source='["yes", "no"]', after="").
        """
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))


class ThinkingSpec(NamedTuple):
    """The markers that delimit the reasoning in an answer, and the token budget of the reasoning.

    Attributes:
        start: the marker at the beginning of reasoning, such as "<think>"; empty if the model never
            generates such a marker.
        end: the marker at the end of reasoning, such as "</think>".
        end_token_ids: the tokens that are forced when the budget is used up: the end marker, and
            the text that the chat format requires before and after the marker.
        is_open: whether the reasoning already begins in the prompt.
        budget: the largest number of reasoning tokens; None means no limit.
    """

    start: str
    end: str
    end_token_ids: tuple[int, ...] = ()
    is_open: bool = False
    budget: int | None = None

    @classmethod
    def from_fields(cls, fields: Iterable[object]) -> Self:
        """Create a specification from a list of fields that another process has sent.

        Example: ["<think>", "</think>", [7], True, 100] means that the reasoning already begins in
        the prompt, and that token 7 is forced after 100 reasoning tokens.

        Raises:
            RequestError: if the fields are not a valid specification.
        """
        values = _as_tuple(fields)
        if len(values) == len(cls._fields):
            start, end, end_token_ids, is_open, budget = values
            if _are_thinking_fields(start, end, end_token_ids, is_open, budget):
                return cls(start, end, tuple(end_token_ids), is_open, budget)
        raise RequestError(
            "thinking: the value must be a list of five items: the start marker, the end "
            "marker, a list of token ids, a boolean, and the budget (an integer of at "
            f"least 0, or null). But it is {values!r}."
        )


def _as_tuple(fields: object) -> tuple[Any, ...]:
    """Convert a list or a tuple to a tuple. Convert any other value to a tuple with one item.

    The value comes from another process and may be invalid. An error message can show the tuple.
    """
    return tuple(fields) if isinstance(fields, list | tuple) else (fields,)


def _are_thinking_fields(
    start: object, end: object, end_token_ids: object, is_open: object, budget: object
) -> bool:
    """Return whether the arguments have the types of the fields of a `ThinkingSpec`."""
    return (
        isinstance(start, str)
        and isinstance(end, str)
        and isinstance(end_token_ids, list | tuple)
        and _are_integers(end_token_ids)
        and isinstance(is_open, bool)
        and _is_budget(budget)
    )


def _are_integers(values: Iterable[object]) -> bool:
    """Return whether all values are integers."""
    # `isinstance` would accept booleans, because bool is a subclass of int.
    return all(type(value) is int for value in values)


def _is_budget(value: object) -> bool:
    """Return whether a value is a token budget: an integer of at least 0, or None for no limit."""
    # `isinstance` would accept booleans, because bool is a subclass of int.
    return value is None or (type(value) is int and value >= 0)


class Guide(Protocol):
    """Limits the next tokens of one sequence, based on a grammar and a thinking budget.

    The state of a guide advances with each token of the answer.

    Two threads never use a guide at the same time. Usually, the thread that calls the engine uses
    the guide. While this thread waits for token masks, other threads use the guide to compute the
    masks.
    """

    def accept(self, token_ids: list[int]) -> None:
        """Update the state of this object with new tokens of the answer.

        Args:
            token_ids: the new tokens, in order.

        Raises:
            EngineError: if the grammar does not allow one of the tokens.
            RequestError: if the grammar takes too much time for the tokens of the answer.
        """

    def fork(self) -> "Guide":
        """Return an independent copy of this object. The copy has the same state."""
