"""Reports the keywords of a JSON schema that constrained decoding does not enforce."""

from __future__ import annotations

import logging

from nereid_parsers.constraints.unenforced_keywords import (
    unenforced_keywords,
)
from nereid_parsers.errors import ConstraintError

log = logging.getLogger(__name__)

# The maximum number of keywords that a warning or an error lists.
_MAX_REPORTED = 16
# The maximum number of characters in the description of one of these keywords.
_MAX_REPORTED_CHARS = 200


def report_unenforced(schema: object, *, is_strict: bool, field: str) -> None:
    """Log a warning if a schema has keywords that xgrammar does not enforce.

    If the request demands that the whole schema is enforced ("strict"), raise an error instead.
    `field` is the name of the request's field that contains the schema, for the message.

    Raises:
        ConstraintError: `is_strict` is true, and xgrammar does not enforce a keyword of `schema`.
    """
    report_keywords(unenforced_keywords(schema), is_strict=is_strict, field=field)


def report_keywords(descriptions: list[str], *, is_strict: bool, field: str) -> None:
    """Log a warning that lists schema keywords that are not enforced, or raise an error.

    Args:
        descriptions: The descriptions of the keywords, such as "not at $.items". If the list is
            empty, nothing is logged or raised.
        is_strict: Whether the request demands that the whole schema is enforced. If so, the list is
            raised as an error.
        field: The name of the request's field that contains the schema. The message starts with
            this name.

    Raises:
        ConstraintError: `is_strict` is true, and `descriptions` is not empty.
    """
    if not descriptions:
        return
    unenforced_parts = "; ".join(map(_printable, descriptions[:_MAX_REPORTED]))
    if len(descriptions) > _MAX_REPORTED:
        unenforced_parts += f"; and {len(descriptions) - _MAX_REPORTED} more"
    if is_strict:
        remedy = "Remove these parts, or set strict to false."
        if field.startswith("tools") and "pattern" in unenforced_parts:
            remedy += (
                " A custom tool with a regular expression is always strict, so remove the regular "
                "expression."
            )
        raise ConstraintError(
            f"{field}: strict is true, but constrained decoding cannot enforce these parts of the "
            f"schema: {unenforced_parts}. {remedy}"
        )
    log.warning(
        "%s: constrained decoding does not enforce these parts of the schema: %s",
        _printable(field),
        unenforced_parts,
    )


def _printable(text: str) -> str:
    r"""Shorten a text to `_MAX_REPORTED_CHARS` characters, and escape unprintable characters.

    Example: a line break becomes the two characters `\n`.

    The text contains names that the client has chosen. An unescaped line break in a name would
    begin a new line of the log, and an escape sequence in a name would control the terminal.
    """
    return "".join(
        char if char.isprintable() else repr(char)[1:-1] for char in text[:_MAX_REPORTED_CHARS]
    )
