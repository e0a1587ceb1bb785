"""The body of `POST /tokenize`, in vLLM's shape."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator


class TokenizeRequest(BaseModel):
    """A prompt, or a chat with whatever its template reads; the tokenizer step checks the rest."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: send exactly one of prompt and messages")
        return self

    @model_validator(mode="after")
    def _only_ids(self) -> Self:
        if self.return_token_strs:
            raise ValueError("return_token_strs: only ids are given, got true; leave it out")
        return self

    def chat_request(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The chat as the tokenizer step reads it; None for a prompt."""
        if self.messages is None:
            return None
        own = ("model", "return_token_strs")
        return {
            name: value for name, value in body.items() if value is not None and name not in own
        }

    def sampling_parameters(self) -> dict[str, Any] | None:
        """What else the tokenizer step needs of a prompt; None for a chat."""
        if self.messages is not None or self.add_special_tokens is None:
            return None
        return {"add_special_tokens": self.add_special_tokens}
