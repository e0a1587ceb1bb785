"""The prompts of a completion: texts or lists of token ids."""

from nereid_client.errors import FieldError, shown

Prompt = str | tuple[int, ...]
"""A prompt of a completion: a text, or token ids."""

_MAX_TOKEN_ID = 2**31 - 1  # the tensor `input_ids` has the type INT32


def read_prompts(value: object) -> tuple[Prompt, ...]:
    """Return the prompts of a body.

    Example: "a" returns ("a",), ["a", "b"] returns ("a", "b"), and [1, 2] returns ((1, 2),).

    Raises: FieldError if the value has none of the four types that the API accepts.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise FieldError(
            "prompt",
            "prompt must be a string, a list of strings, a list of token ids or a list of lists "
            f"of token ids, but the request has {shown(value)}",
        )
    if not value:
        raise FieldError("prompt", "prompt must not be an empty list")
    if _is_token_id(value[0]):
        return (_token_ids(value, "prompt"),)
    if isinstance(value[0], str):
        return tuple(_string(item, index) for index, item in enumerate(value))
    return tuple(_token_ids(item, f"prompt[{index}]") for index, item in enumerate(value))


def _string(item: object, index: int) -> str:
    if not isinstance(item, str):
        raise FieldError(
            "prompt",
            f"prompt[{index}] must be a string, because the first item of prompt is a string, but "
            f"the request has {shown(item)}",
        )
    return item


def _token_ids(value: object, place: str) -> tuple[int, ...]:
    """Return a list of token ids as a tuple.

    Raises: FieldError if the value at `place` is not such a list.
    """
    if not isinstance(value, list) or not value:
        raise FieldError(
            "prompt",
            f"{place} must be a list of at least one token id, but the request has {shown(value)}",
        )
    for token in value:
        if not _is_token_id(token):
            raise FieldError(
                "prompt",
                f"{place} must contain integers from 0 to {_MAX_TOKEN_ID} as token ids, but the "
                f"request has {shown(token)}",
            )
    return tuple(value)


def _is_token_id(value: object) -> bool:
    # A boolean is an int, but not a token id.
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID
