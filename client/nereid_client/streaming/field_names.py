"""In error messages, replaces field names of chat completions by field names of another API.

The Responses API and Anthropic's API translate their requests to chat completions. An error of the
backend therefore names a field that the client has not sent.
"""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from nereid_client.errors import ApiError, BackendError, to_api_error
from nereid_client.streaming.deltas import Delta


class FieldNames:
    """The field names of another API that correspond to the field names of chat completions.

    Args:
        names: maps a field of a chat completion to the field of the other API.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        # Example: the pattern matches "messages" in "messages[0].content is empty".
        self._pattern = re.compile(rf"^({'|'.join(names)})(?=[:.\[ ]|$)")

    def rename_fields(self, error: BackendError) -> ApiError:
        """Convert an error of the backend to an ApiError. Replace the field names in the error.

        Example: "max_tokens must be at most 10" becomes "max_output_tokens must be at most 10".
        """
        api_error = to_api_error(error)
        if api_error.status != 400:
            return api_error
        message = self._rename_start(api_error.message)
        param = None if api_error.param is None else self._rename_start(api_error.param)
        return ApiError(400, message, param=param, code=api_error.code)

    def _rename_start(self, text: str) -> str:
        """If the text starts with a known field name, replace the field name by its new name."""
        return self._pattern.sub(lambda match: self._names[match[1]], text)

    async def rename_fields_in_errors(self, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
        """Yield the deltas unchanged. If the backend fails, rename the fields in the error message.

        Raises: ApiError for every BackendError.
        """
        async with aclosing(deltas):
            try:
                async for delta in deltas:
                    yield delta
            except BackendError as error:
                raise self.rename_fields(error) from None
