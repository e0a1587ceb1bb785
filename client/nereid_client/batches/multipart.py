"""Parses an uploaded form (multipart/form-data) with one file, while the form arrives.

Starlette's parser would first store the whole file in the temporary folder.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from nereid_client.errors import ApiError, shown

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# In file names, browsers and HTTP libraries escape only quotation marks and line breaks.
_ESCAPED_CHARACTER = re.compile("%(?:22|0A|0D)")
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4096


class FormReader:
    """Parses a form that contains one file and some short text fields.

    The form part that contains the file must have the name `file`.

    Attributes:
        fields: the text fields.
        filename: the file name of the part `file`. None until this part arrives.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        """Create the parser.

        Args:
            content_type: the header Content-Type of the request.
            write: a function that receives the bytes of the file.

        Raises: ApiError 400 if the content type is not a form, or if its boundary is too long.
        """
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._write = write
        self._num_parts = 0  # the number of parts that have started
        self._is_complete = False  # whether the end of the form has arrived

        # The form part that is being parsed.
        self._disposition = b""  # the value of the part's header Content-Disposition
        self._name = ""  # the name of the form field
        self._is_file = False
        self._text = b""  # the value of a text field

        # The header that the parser is currently reading.
        self._header_name = b""
        self._header_value = b""

        # The parser calls these methods while it reads the parts of the form and their headers.
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._read_names_of_part,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(_boundary_of(content_type), callbacks)
        except FormParserError as error:
            raise ApiError(
                400, f"The Content-Type of the request has an invalid boundary: {error}"
            ) from None

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body.

        Raises: ApiError 400 if the body is not a valid form, and the errors that `write` raises.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, f"The request body is not a valid form: {error}") from None

    def finish(self) -> None:
        """Check that the form is complete.

        Raises: ApiError 400.
        """
        if not self._is_complete:
            raise ApiError(
                400, "The request body ends in the middle of the form. Send the complete form."
            )
        if self.filename is None:
            raise ApiError(
                400, "file is required, but the form has no part with this name", param="file"
            )

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise ApiError(400, f"The form has more than {_MAX_FIELDS} parts")
        self._disposition = self._text = b""

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _read_names_of_part(self) -> None:
        """Read the field name and the file name from the headers of a form part.

        Raises: ApiError 400 if the form has two files.
        """
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if not self._is_file:
            return
        if self.filename is not None:
            raise ApiError(
                400,
                "The form must have one part with the name `file`, but it has two",
                param="file",
            )
        filename = options.get(b"filename", b"").decode("utf-8", "replace")
        # In a file name, browsers and HTTP libraries write a quotation mark as %22, and line breaks
        # as %0A and %0D. They do not change other characters, not even the percent sign.
        self.filename = _ESCAPED_CHARACTER.sub(lambda match: unquote(match[0]), filename) or "file"

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        """Write the next bytes to the uploaded file, or append them to the text of a field.

        The parser calls this method. The bytes are `data[start:end]`.

        Raises: ApiError 400 if the text is too long.
        """
        content = data[start:end]
        if self._is_file:
            self._write(content)
            return
        self._text += content
        if len(self._text) > _MAX_FIELD_BYTES:
            raise ApiError(
                400,
                f"{shown(self._name)} must have at most {_MAX_FIELD_BYTES} bytes, but the form has "
                "more",
            )

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


def _boundary_of(content_type: str) -> bytes:
    """Return the boundary in the header Content-Type. The boundary separates the parts of a form.

    Example: "multipart/form-data; boundary=abc" returns b"abc".

    Raises: ApiError 400 if the header has another media type or contains no boundary.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(
            400,
            "A file must be uploaded as multipart/form-data with a boundary, but the request "
            f"has the Content-Type {shown(content_type)}",
        )
    return boundary
