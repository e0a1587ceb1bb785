"""The bodies of `POST /tokenize` and `POST /detokenize`, in vLLM's format."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from nereid_client.errors import FieldError
from nereid_client.protocol.custom_tools import with_custom_tools_as_functions
from nereid_client.protocol.request_body import RequestBody, check_token_ids

_NOT_IN_CHAT = ("model", "return_token_strs")
"""The fields of the body that do not belong to a chat."""


class TokenizeRequest(RequestBody):
    """The body of `POST /tokenize`: a prompt, or the messages of a chat.

    Further fields of a chat, such as `tools`, are passed on to the chat template.
    """

    model: str | None = None
    """The name of the served model. It may be left out."""
    prompt: str | None = None
    """The text to tokenize."""
    messages: list[dict[str, Any]] | None = None
    """The messages of a chat. The chat template renders them before they are tokenized."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens, such as a begin token."""
    return_token_strs: bool | None = None
    """Not supported: only token ids are returned."""

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        """Check that the request has either a prompt or messages, but not both."""
        if (self.prompt is None) == (self.messages is None):
            given = "neither of them" if self.prompt is None else "both of them"
            raise FieldError(
                "prompt",
                f"Exactly one of prompt and messages is required, but the request has {given}",
            )
        return self

    @model_validator(mode="after")
    def _check_return_token_strs(self) -> Self:
        if self.return_token_strs:
            raise FieldError(
                "return_token_strs",
                "return_token_strs=true is not supported, because the response contains only token "
                "ids. Remove return_token_strs from the request.",
            )
        return self

    @model_validator(mode="after")
    def _check_custom_tools(self) -> Self:
        """Check the custom tools of a chat, and the calls of custom tools in its messages.

        Raises: FieldError. The conversion, whose result is not needed here, raises the error.
        """
        if self.messages is not None:
            with_custom_tools_as_functions({**(self.model_extra or {}), "messages": self.messages})
        return self

    def chat_request(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the chat for the tokenizer model, or None if the request has a prompt.

        The tokenizer model accepts the body of a chat completion without custom tools, so the
        custom tools in the chat become functions.

        Args:
            body: the body as the client sent it. Fields that this class does not declare, such as
                `tools`, also belong to the chat.
        """
        if self.messages is None:
            return None
        return with_custom_tools_as_functions(
            {
                name: value
                for name, value in body.items()
                if value is not None and name not in _NOT_IN_CHAT
            }
        )

    def tokenizer_parameters(self) -> dict[str, Any] | None:
        """Return the tokenizer parameters for a prompt, or None if the request sets no parameters.

        For a chat, the field `add_special_tokens` is part of the chat instead.
        """
        if self.messages is not None or self.add_special_tokens is None:
            return None
        return {"add_special_tokens": self.add_special_tokens}


class DetokenizeRequest(RequestBody):
    """The body of `POST /detokenize`."""

    model: str | None = None
    """The name of the served model. It may be left out."""
    tokens: Annotated[list[Any], Field(min_length=1)]
    """The token ids."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text. The default is false."""

    @field_validator("tokens")
    @classmethod
    def _check_tokens(cls, value: list[Any]) -> list[int]:
        return check_token_ids(value, "tokens", "tokens")
