"""Checks a text that a route sends as a parameter of a Triton request."""

from nereid_client.errors import ApiError, shown
from nereid_client.request_context import check_unicode


def check_parameter(text: str, field: str) -> None:
    r"""Check that a text is valid Unicode and contains no NUL character.

    The Triton server cuts off a parameter at the first NUL character. Example: it would read
    "/models/a\0b" as "/models/a".

    Raises: ApiError 400 that names the invalid character. `field` is the name of the text.
    """
    check_unicode(text)
    if "\0" in text:
        raise ApiError(
            400,
            f"{field} must not contain a NUL character, but the request has {shown(text)}",
            param=field,
        )
