"""Reads the prompts of a completion. A prompt is a text or a list of token ids."""

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.request_body import check_token_ids

Prompt = str | tuple[int, ...]
"""A prompt of a completion: a text, or token ids."""


def read_prompts(value: object) -> tuple[Prompt, ...]:
    """Return the prompts in the field `prompt` of a completion.

    Examples:
        "a"           -> ("a",)
        ["a", "b"]    -> ("a", "b")
        [1, 2]        -> ((1, 2),)
        [[1, 2], [3]] -> ((1, 2), (3,))

    Raises: FieldError if the value has none of these forms.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _wrong_type_error(value)
    if not value:
        raise FieldError("prompt", "prompt must not be an empty list")
    match value[0]:
        case str():
            _check_texts(value)
            return tuple(value)
        case list():
            return tuple(
                tuple(check_token_ids(item, "prompt", f"prompt[{index}]"))
                for index, item in enumerate(value)
            )
        case int() | float():  # the error about a float tells that token ids must be integers
            return (tuple(check_token_ids(value, "prompt", "prompt")),)
    raise _wrong_type_error(value)


def _wrong_type_error(value: object) -> FieldError:
    return FieldError(
        "prompt",
        "prompt must be a string, a list of strings, a list of token ids or a list of lists "
        f"of token ids, but the request has {shown(value)}",
    )


def _check_texts(prompts: list[object]) -> None:
    """Raise a FieldError if a prompt is not a string. The caller has checked the first prompt."""
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise FieldError(
                "prompt",
                f"prompt[{index}] must be a string, but the request has {shown(prompt)}. All "
                "items of prompt must have the same type as the first item.",
            )
