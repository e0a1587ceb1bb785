# SPDX-License-Identifier: Apache-2.0
"""Renders the chat messages of embedding models and rerankers with the checkpoint's template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from nereid_parsers import TemplateError
from nereid_parsers.template import LimitError, RenderRefused, RequestTemplate
from transformers import PreTrainedTokenizerBase

from nereid_backend.errors import ModelError, RequestError


class MessageTemplate:
    """The chat template of a tokenizer. Rendering has limits on time and on size.

    Without the limits, a template with nested loops would block the process.
    """

    def __init__(self, template: RequestTemplate, special_tokens: Mapping[str, object]) -> None:
        """Store the compiled template. Only `compile` calls `__init__`.

        Args:
            template: the compiled template.
            special_tokens: the special tokens by name, such as "bos_token".
        """
        self._template = template
        # The variables that every chat template gets, as in transformers.
        self._variables = {
            "documents": None,
            "tools": None,
            "add_generation_prompt": False,
            **special_tokens,
        }

    @classmethod
    def compile(
        cls, folder: Path, tokenizer: PreTrainedTokenizerBase, name: str = "default"
    ) -> Self | None:
        """Compile the chat template of a tokenizer; None if the tokenizer has no template.

        Args:
            folder: the folder of the checkpoint, for error messages.
            tokenizer: the tokenizer.
            name: the name of the template, if the tokenizer has several templates.

        Raises:
            ModelError: the template has a syntax error, or exceeds a limit.
        """
        template = tokenizer.chat_template
        source = template.get(name) if isinstance(template, dict) else template
        if not source:
            return None
        try:
            compiled = RequestTemplate(source)
        except TemplateError as error:
            raise ModelError(
                f"{folder}: the chat template cannot be used: {error}. Correct the template, or "
                "use another checkpoint."
            ) from error
        return cls(compiled, tokenizer.special_tokens_map)

    def render(
        self, messages: Sequence[dict[str, str]], variables: Mapping[str, Any], *, has_parts: bool
    ) -> str:
        """Return the text of a prompt.

        Example: the template "{{ messages[0].content }}!" and the messages [{"role": "user",
        "content": "Hi"}] return "Hi!".

        Args:
            messages: the messages.
            variables: the variables of the template.
            has_parts: whether the template expects a list of parts as the content of a message.
                Example: [{"type": "text", "text": "Hi"}] instead of "Hi".

        Raises:
            RequestError: the template cannot render the messages, or exceeds a limit.
        """
        rendered: list[dict[str, Any]] = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if has_parts
            else dict(message)
            for message in messages
        ]
        try:
            return self._template.render({**self._variables, **variables, "messages": rendered})
        except LimitError as error:
            raise RequestError(f"input: the chat template exceeds a limit: {error}.") from error
        except RenderRefused as error:
            raise RequestError(
                f"input: the chat template cannot render this input: {error}"
            ) from error
