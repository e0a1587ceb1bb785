r"""Regular expressions for the input of custom tools.

The engine enforces the keyword `pattern` of a JSON schema while the model writes the string in a
tool call. The postprocessor then validates the string with Python's module `re`. An expression that
the engine's grammar library cannot enforce is refused. The limits of the library are listed in
`nereid_parsers.constraints.enforceable_pattern`.
"""

from nereid_parsers.constraints.enforceable_pattern import PatternError, split_pattern

from nereid_client.errors import FieldError

_MAX_CHARS = 4096


def whole_input_pattern(regex: str, place: str) -> str:
    r"""Return a JSON schema `pattern` that matches only if the whole input matches `regex`.

    A `^` at the beginning and a `$` at the end of the expression or of one of its alternatives have
    no effect on a match of the whole input. The result does not contain these anchors, because the
    engine's grammar library would log a warning for each anchor. Groups have no names in the
    result, because the postprocessor validates the input with Python's module `re`, which knows
    `(?P<name>` but not `(?<name>`.

    Example: `^a|b$` returns `^(?:a|b)$`, which matches the inputs "a" and "b".

    Raises: FieldError if the expression is not valid, or if the engine cannot enforce it.
    """
    if len(regex) > _MAX_CHARS:
        raise FieldError(
            place,
            f"{place} must have at most {_MAX_CHARS} characters, but the request has {len(regex)}",
        )
    try:
        tokens = split_pattern(regex)
    except PatternError as error:
        raise FieldError(
            place, f"{place} must be a regular expression that can be enforced, but {error}"
        ) from None
    texts = [
        "(?:" if token.kind == "open" else token.text for token in tokens if token.kind != "anchor"
    ]
    return f"^(?:{''.join(texts)})$"
