"""The exceptions of the frontend. Each exception becomes an error body in OpenAI's format.

FrontendError
|- ApiError          an HTTP error response: status, message, `param` and `code`
|  '- Disconnected   the client has closed the connection, so nobody reads the response
'- BackendError      an error of the Triton server: a gRPC status code and a message

The validators of the request bodies raise FieldError. FieldError is a subclass of ValueError,
because pydantic catches a ValueError of a validator and raises a ValidationError instead.
`from_validation` converts a ValidationError to an ApiError.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails


class FrontendError(Exception):
    """The base class of all exceptions that the frontend raises on purpose."""


class ApiError(FrontendError):
    """An HTTP error response in the format of the OpenAI API."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        limit: str | None = None,
    ) -> None:
        """Create the error.

        Args:
            status: the HTTP status code.
            message: the text that the user reads.
            param: the name of the request field that caused the error.
            code: the machine-readable reason, such as "model_not_found".
            headers: additional response headers.
            limit: the name of the setting whose limit the request exceeded, such as
                "max_body_bytes". The name is the label of a metric and does not appear in the
                response.
        """
        super().__init__(message)
        self.status = status
        self.message = _valid_unicode(message)
        self.param = param and _valid_unicode(param)
        self.code = code
        self.headers = dict(headers or {})
        self.limit = limit

    def body(self) -> dict[str, Any]:
        """Return the JSON body: `{"error": {"message", "type", "param", "code"}}`."""
        default_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _ERROR_TYPES.get(self.status, default_type),
                "param": self.param,
                "code": self.code,
            }
        }


class Disconnected(ApiError):
    """The client closed the connection before it received the complete response."""

    def __init__(self) -> None:
        super().__init__(
            499, "The client closed the connection before the response ended", code="cancelled"
        )


class BackendError(FrontendError):
    """The Triton server rejected a request or failed to process it.

    Args:
        code: the name of a gRPC status code, such as `INVALID_ARGUMENT`.
        message: the server's message. If it starts with the name of a request field, as in
            "temperature: must be at least 0, got -1", the name becomes the error's `param`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class FieldError(ValueError):
    """A field of a request body has a value that the frontend does not accept.

    Args:
        field: the path of the field in the body, such as "tools[0].name".
        message: a sentence that names the field, the value and the remedy.
        code: the machine-readable reason, as in ApiError.
    """

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


_ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""Maps an HTTP status to the `type` in the error body.

For other statuses, `ApiError.body` uses a default type."""

_HTTP_STATUS_AND_CODE = {
    "INVALID_ARGUMENT": (400, None),
    "UNAVAILABLE": (503, "unavailable"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_exceeded"),
    "CANCELLED": (499, "cancelled"),
    "DEADLINE_EXCEEDED": (504, "timeout"),
}
"""Maps a gRPC status code to an HTTP status and OpenAI's error code.

For other gRPC status codes, the HTTP status is 500."""

_ENCODER = json.JSONEncoder(default=repr)
# Matches the waiting time in a message of the executor, such as "Try again in 4 s".
_RETRY_AFTER = re.compile(r"again in (\d+) s\b")
# Matches "9000 tokens; the limit is 4096 (max_model_len)" and
# "9000 tokens, but max_model_len is 4096".
_TOO_MANY_TOKENS = re.compile(
    r"\b(\d+) tokens\b.*?(?:(\d+) \(max_model_len\)|max_model_len\D{0,10}(\d+))"
)
# Matches the name of the input tensor that contains the prompt.
_TENSOR_NAME = re.compile(r"^(text_input|input_ids)(?=:| )")
_FIELD_PATH = re.compile(r"[a-z_][A-Za-z0-9_.\[\]]*")
# Matches the beginning "temperature: " of the message "temperature: must be at least 0".
_FIELD_AND_COLON = re.compile(rf"^({_FIELD_PATH.pattern}): ")
# Matches a field name at the start of a sentence, such as "max_tokens" in "max_tokens must be at
# least 1". A word that contains "_", "." or "[" is treated as a field name. Any other word is
# treated as a field name only if the pattern contains the word. For example, the pattern does not
# contain "image", so it does not match "image is too large".
_FIELD_IN_SENTENCE = re.compile(
    r"^([a-z]\w*(?:[_.\[]\w*\]?)+|temperature|seed|stop|regex|ebnf|n|tools|messages|prompt|input)"
    r" (?=(?:must|requires|is|can|cannot|does)\b)"
)
# Matches the words "the value" in "seed: the value must be an integer". These words and the colon
# are removed, so that the message becomes "seed must be an integer".
_SUBJECT = re.compile(r"^(?:the value|this field) ")
_VERB = re.compile(r"(?:must|requires|is|are|has|have|can|cannot|does|needs|takes|accepts)\b")

_REQUIREMENTS = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer with fewer digits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "a string with at least {min_length} character",
    "string_too_long": "a string with at most {max_length} characters",
    "too_short": "at least {min_length} items long",
    "too_long": "at most {max_length} items long",
}
"""Maps an error type of pydantic to the end of the sentence "FIELD must be ..."."""

_DESCRIPTIONS_OF_TYPES = {
    "bool": "true or false",
    "str": "a string",
    "list[str]": "a list of strings",
    "list[dict[str,any]]": "a list of objects",
    "dict[str,any]": "an object",
}
"""Maps pydantic's name of a type to a description, for fields that accept several types.

For such a field, pydantic reports one error for each type, and appends the name of the type to the
path of the field. Example: the path ("stop", "list[str]").
"""


def to_api_error(error: FrontendError) -> ApiError:
    """Return the HTTP error response for an exception of the frontend.

    Example: `BackendError("INVALID_ARGUMENT", "temperature: must be at least 0, got -1")` becomes
    a 400 with the message "temperature must be at least 0, got -1" and the param "temperature".
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, BackendError):
        return ApiError(500, str(error), code="internal_error")
    status, code = _HTTP_STATUS_AND_CODE.get(error.code, (500, "internal_error"))
    # HTTP clients do not know the names of input tensors, so the field `prompt` is named instead.
    message = _TENSOR_NAME.sub("prompt", error.message)
    if status == 400:
        return _invalid_argument_error(message)
    headers = None
    if status in (429, 503):
        # Example: the message "Try again in 4 s." gives the header "Retry-After: 4".
        match = _RETRY_AFTER.search(message)
        headers = {"Retry-After": match[1] if match else "1"}
    return ApiError(status, message, code=code, headers=headers)


def _invalid_argument_error(message: str) -> ApiError:
    """Return an ApiError 400 for a wrong field that the backend has reported.

    OpenAI's API has an error code and two messages for an input that is too long. Many clients look
    for this code or for the words of one message, so the error for such an input contains the code
    and the words of both messages.

    Example: "Input tokens exceed the configured limit: prompt has 9000 tokens; the limit is 4096
    (max_model_len). This model's maximum context length is 4096 tokens."
    """
    param, sentence = _split_field(message)
    lengths = tokens_and_limit(sentence)
    if lengths is None:
        return ApiError(400, sentence, param=param)
    _, limit = lengths
    return ApiError(
        400,
        f"Input tokens exceed the configured limit: {sentence.removesuffix('.')}. This model's "
        f"maximum context length is {limit} tokens.",
        param=param,
        code="context_length_exceeded",
    )


def tokens_and_limit(message: str) -> tuple[int, int] | None:
    """Read the number of tokens and the limit from an error message about too many tokens.

    Return None for any other message.

    Example: "prompt has 9000 tokens; the limit is 4096 (max_model_len)" returns (9000, 4096).
    """
    match = _TOO_MANY_TOKENS.search(message)
    return None if match is None else (int(match[1]), int(match[2] or match[3]))


def from_validation(error: ValidationError) -> ApiError:
    """Return an ApiError 400 that describes the first wrong field of a request body.

    Example: the error for the temperature 2.5 has the message "temperature must be at most 2, but
    the request has 2.5" and the param "temperature".
    """
    return from_field_error(first_field_error(error))


def from_field_error(error: FieldError) -> ApiError:
    """Return an ApiError 400 that describes a wrong field of a request body."""
    return ApiError(400, str(error), param=error.field or None, code=error.code)


def first_field_error(error: ValidationError, place: str = "") -> FieldError:
    """Return a FieldError for the first wrong field in an object.

    Args:
        error: pydantic's error.
        place: the path of the object in the request body, such as "tools[0]". The path of the body
            itself is "".
    """
    details = error.errors(include_url=False)
    if place:
        details = [{**detail, "loc": (place, *detail["loc"])} for detail in details]
    # If a validator of Nereid raised a FieldError, pydantic's details contain this FieldError.
    error_of_validator = details[0].get("ctx", {}).get("error")
    if isinstance(error_of_validator, FieldError):
        return error_of_validator
    path = _path(details[0])
    # A path can contain a key that the client chose, such as "my key" in `metadata.my key`. The
    # error's `param` is set only if the path consists of field names.
    has_only_field_names = _FIELD_PATH.fullmatch(path) is not None
    return FieldError(path if has_only_field_names else "", _message_for_first_field(details))


def _message_for_first_field(details: Sequence[ErrorDetails]) -> str:
    """Return the error message for the first wrong field of an object.

    Example: "prompt is required, but the request does not contain it".
    """
    first = details[0]
    path = _path(first)
    if first["type"] == "missing":
        return f"{path} is required, but the request does not contain it"
    if first["type"] == "too_short":  # no field requires more than one item
        return f"{path} must have at least 1 item, but the request has an empty list"
    if first["type"] == "string_pattern_mismatch":
        pattern = first["ctx"]["pattern"]
        return (
            f"{path} must match the pattern {pattern}, but the request has {shown(first['input'])}"
        )
    # If the field accepts several types, pydantic reports an error for each of these types. The
    # message therefore lists the types of all errors.
    return _type_or_range_message(details)


def _type_or_range_message(details: Sequence[ErrorDetails]) -> str:
    """Return the error message for a field whose value has a wrong type or is out of range.

    If a field accepts several types, pydantic reports at least one error for each of these types.
    The field `stop` accepts a string or a list of strings. Examples:

        stop=5        has the errors "stop: no string" and "stop: no list". The message is "stop
                      must be a string or a list of strings, but the request has 5".
        stop=["a", 5] has the errors "stop: no string" and "stop[1]: no string". The message is
                      "stop[1] must be a string, but the request has 5".
    """
    field = _path(details[0])  # `_path` omits the accepted type, with which pydantic ends the path
    value = details[0]["input"]
    # An error for a member of a list means that the field accepts lists. The message names the
    # first wrong member.
    wrong_members = [detail for detail in details if _path(detail).startswith(f"{field}[")]
    if isinstance(value, list) and wrong_members:
        member = wrong_members[0]
        return _wrong_value_message(_path(member), _requirement(member), member["input"])
    requirements = [_requirement(detail) for detail in details if _path(detail) == field]
    # Two accepted types can have the same description. `dict.fromkeys` removes the duplicates.
    accepted = " or ".join(dict.fromkeys(requirements))
    return _wrong_value_message(field, accepted, value)


def _wrong_value_message(path: str, requirement: str, value: object) -> str:
    return f"{path} must be {requirement}, but the request has {shown(value)}"


def shown(value: object, limit: int = 80) -> str:
    """Convert a value to JSON text for an error message. The text has at most `limit` characters.

    Example: `shown("abcdefgh", limit=8)` returns '"abcd...'.
    """
    text = ""
    # The conversion ends at the limit, because the JSON text of a value can have many megabytes.
    for piece in _ENCODER.iterencode(value):
        text += piece
        if len(text) > limit:
            return text[: limit - 3] + "..."
    return text


def _valid_unicode(text: str) -> str:
    r"""Escape each half of a surrogate pair in a text, which may contain a name from the request.

    Example: the text "metadata.\ud800" with one such character at its end becomes a text that ends
    with the six characters \ud800.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def _split_field(message: str) -> tuple[str | None, str]:
    """Split an error message of the backend into the field name and a sentence.

    The name is None if the message does not begin with a field. A message with a colon becomes a
    sentence only if the text after the colon begins with a verb, or with "the value" and a verb.

    Examples:
        "seed: the value must be an integer"  -> ("seed", "seed must be an integer")
        "seed: unexpected value"              -> ("seed", "seed: unexpected value")
        "seed must be an integer"             -> ("seed", "seed must be an integer")
        "the queue is full"                   -> (None, "the queue is full")
    """
    before_colon = _FIELD_AND_COLON.match(message)
    if before_colon is None:
        in_sentence = _FIELD_IN_SENTENCE.match(message)
        return (in_sentence[1] if in_sentence else None), message
    field = before_colon[1]
    rest = _SUBJECT.sub("", message[before_colon.end() :])
    if _VERB.match(rest):
        return field, f"{field} {rest}"
    return field, message


def _requirement(detail: ErrorDetails) -> str:
    """Return the words that follow "FIELD must be" in an error message, such as "at most 2".

    If a field accepts several types, the path in pydantic's error ends with the name of one type,
    as in ("stop", "list[str]"). The words then describe this type: "a list of strings".

    Otherwise, the type of the error selects the words. Examples: the type "less_than_equal" returns
    "at most 2", and the type "literal_error" returns "'float' or 'base64'".
    """
    last_part_of_path = str(detail["loc"][-1]) if detail["loc"] else ""
    if last_part_of_path in _DESCRIPTIONS_OF_TYPES:
        return _DESCRIPTIONS_OF_TYPES[last_part_of_path]
    requirement = _REQUIREMENTS.get(detail["type"])
    if requirement is None:
        # Use pydantic's message without words such as "should be". Example: "Input should be a
        # valid URL" becomes "a valid URL".
        return re.sub(r"^(Input|String|Value) should (be )?", "", detail["msg"])
    # Replace the placeholder in a requirement. Example: "at most {le}" becomes "at most 2".
    limits = {name: _plain_number(limit) for name, limit in detail.get("ctx", {}).items()}
    return requirement.format(**limits)


def _plain_number(value: object) -> object:
    """Convert a float such as 2.0 to an integer. Return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _path(detail: ErrorDetails) -> str:
    """Return the path of a wrong field in the request body, such as `messages[0].role`."""
    # If the field accepts several types, pydantic adds the name of a type to the path. Omit this
    # name.
    parts = [part for part in detail["loc"] if part not in _DESCRIPTIONS_OF_TYPES]
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")
