# SPDX-License-Identifier: Apache-2.0
"""Checks the fields of requests with pydantic, and writes the error messages for wrong values."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.errors import RequestError

_MAX_SHOWN_CHARS = 80

# Maps each error type of pydantic to the end of the sentence "the value must be ...".
_REQUIREMENTS = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "is_instance_of": "a list",
    "sequence_str": "a list",
    "dict_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_long": "a text of at most {max_length} characters",
    "too_short": "a list of at least {min_length} item",
    "too_long": "a list of at most {max_length} items",
}

TokenId = Annotated[int, Field(ge=0, lt=2**64)]
TokenIds = Annotated[Sequence[TokenId], AfterValidator(tuple)]
_SomeTokenIds = Annotated[TokenIds, Field(min_length=1)]
# The validation converts the dict of logit biases to a tuple of sorted pairs. `dataclasses.replace`
# validates this tuple again, so the type must also accept a tuple.
_Biases = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(lambda value: dict(value) if isinstance(value, tuple) else value),
    AfterValidator(lambda biases: tuple(sorted(biases.items()))),
]


def shown(value: object) -> str:
    """Return the value of a request field as JSON text of at most 80 characters.

    Examples: `True` gives `true`, `"hot"` gives `"hot"`, and None gives `no value`, because a
    field with the value null counts as missing.
    """
    if value is None:
        return "no value"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def to_request_error(error: ValidationError) -> RequestError:
    """Convert a validation error of pydantic to a RequestError about the first wrong field.

    Example: `seed="x"` gives `seed: the value must be an integer, but the request has "x".` If the
    list `bad_words_token_ids` contains an empty list, the message is `bad_words_token_ids: each
    item must be a list of at least 1 item, but the request has 0.`
    """
    first_error = error.errors(include_url=False)[0]
    # The location starts with the name of the field. If a single item of a list or dict is wrong,
    # the index or the key of the item follows the name.
    field_name, *item_location = map(str, first_error["loc"])
    requirement_template = _REQUIREMENTS.get(first_error["type"])  # such as "at least {ge}"
    if requirement_template is None:
        return RequestError(f"{field_name}: {first_error['msg']}.")
    limits = _limits(first_error.get("ctx", {}))  # such as {"ge": 1}
    subject = _subject(item_location)
    requirement = requirement_template.format(**limits)
    # If a list has a wrong number of items, pydantic reports the number as "actual_length". Show
    # this number instead of the items.
    wrong_value = limits.get("actual_length", first_error["input"])
    return RequestError(
        f"{field_name}: {subject} must be {requirement}, but the request has {shown(wrong_value)}."
    )


def _subject(item_location: Sequence[str]) -> str:
    """Return the subject of the error sentence: "the value", "each item" or "each key".

    `item_location` is empty if the whole field is wrong. Otherwise, it contains the index or the
    key of a wrong item. Its last item is "[key]" if the key itself is wrong.
    """
    if not item_location:
        return "the value"
    return "each key" if item_location[-1] == "[key]" else "each item"


def _limits(context: dict[str, Any]) -> dict[str, Any]:
    """Return the limits that a pydantic error contains. The limit 2.0 becomes the integer 2.

    A message then contains "at most 2" instead of "at most 2.0", as in the API's documentation.
    """
    return {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        for name, bound in context.items()
    }


_CONFIG = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class CheckedSamplingParams(SamplingParams):
    """Sampling parameters that are validated when the object is created.

    Lists are stored as tuples, and `logit_bias` is stored as sorted pairs. The fields below are
    declared again because the types in core/sampling_params.py cannot limit the items of a list.

    Raises:
        RequestError: a value has the wrong type or is out of range. The message names the field.
    """

    stop_token_ids: TokenIds = ()
    logit_bias: _Biases = ()  # type: ignore[assignment]
    allowed_token_ids: _SomeTokenIds | None = None
    bad_words_token_ids: Annotated[Sequence[_SomeTokenIds], AfterValidator(tuple)] = ()
    grammar: Annotated[GrammarSpec, BeforeValidator(GrammarSpec.from_fields)] | None = None
    thinking: Annotated[ThinkingSpec, BeforeValidator(ThinkingSpec.from_fields)] | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _raise_request_errors(
        cls,
        values: Any,  # noqa: ANN401 - the arguments of the constructor
        validate: ModelWrapValidatorHandler[Self],
    ) -> Self:
        """Validate the constructor's arguments, and convert pydantic's error to a RequestError.

        Also raise a RequestError if min_tokens is larger than max_tokens. pydantic calls this
        method instead of its own validation, and passes its own validation as `validate`.
        """
        try:
            params = validate(values)
        except ValidationError as error:
            raise to_request_error(error) from None
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens: the value must be at most max_tokens ({params.max_tokens}), but the "
                f"request has {params.min_tokens}."
            )
        return params
