# SPDX-License-Identifier: Apache-2.0
"""From what a request carries to prompt token ids: text, ids, or a chat through the template."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereid_backend.errors import ModelError, RequestError
from nereid_backend.serving.tokenizer.thinking_effort import template_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine.

    Attributes:
        token_ids: what the model reads.
        text: the same as text, when it came as text or chat.
    """

    token_ids: list[int]
    text: str | None


def load_tokenizer(model: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint, loaded without torch and without remote code.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    # The stubs must stay light and must not hold what can crash. transformers takes torch wherever
    # it finds it; an entry of None makes it find none.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    if not Path(model).is_dir():
        raise ModelError(f"model: {model} is not a folder; give the path of a checkpoint")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model: {model} has no tokenizer that can be read: {error}") from error
    return tokenizer


class PromptBuilder:
    """Turns requests into prompts with one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text alone: markers become special tokens, nothing is added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def from_text(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """Tokenise a prompt as it is, with the special tokens the tokenizer adds.

        Raises:
            RequestError: there is nothing in it.
        """
        token_ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        if not token_ids:
            raise RequestError("text_input: is empty, and this tokenizer adds no first token")
        return Prompt(list(token_ids), text)

    def from_chat(self, body: Mapping[str, Any]) -> Prompt:
        """Render a chat through the checkpoint's template and tokenise it.

        Args:
            body: a chat completion request: messages, tools, chat_template_kwargs,
                reasoning_effort, thinking, documents, add_generation_prompt,
                continue_final_message, add_special_tokens.

        Raises:
            RequestError: the messages are malformed, or the template refuses them.
        """
        messages = [_message(m, at) for at, m in enumerate(_list(body, "messages"))]
        if not messages:
            raise RequestError("messages: is empty; send at least one message")
        if not self._tokenizer.chat_template:
            raise RequestError(
                "messages: this checkpoint has no chat template; send text_input instead"
            )
        template = self._tokenizer.chat_template
        named = template.values() if isinstance(template, dict) else [template]
        extra = template_kwargs(body, "\n".join(named))
        continues = read_flag(body, "continue_final_message", default=False)
        generates = read_flag(body, "add_generation_prompt", default=not continues)
        if continues and generates:
            raise RequestError(
                "continue_final_message: cannot be true together with add_generation_prompt; "
                "send add_generation_prompt false"
            )
        _refuse_mistaken(body)
        text = self._render(
            messages,
            tools=read_tools(body),
            add_generation_prompt=generates,
            continue_final_message=continues,
            **extra,
        )
        # The template writes the special tokens itself.
        adds = read_flag(body, "add_special_tokens", default=False)
        token_ids = self._tokenizer(text, add_special_tokens=adds)["input_ids"]
        return Prompt(list(token_ids), text)

    def _render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:  # noqa: ANN401
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except TemplateError as error:
            raise RequestError(f"messages: the chat template refuses them: {error}") from error
        except Exception as error:
            # A template may fail in any way a program can, and these messages made it.
            told = f"{type(error).__name__}: {error}"
            raise RequestError(f"messages: cannot be rendered: {told}") from error
        assert isinstance(text, str)
        return text


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise RequestError(f"{name}: must be a list, got {_short(value)}")
    return value


def _message(message: Any, at: int) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    if not isinstance(message, dict):
        raise RequestError(f"messages: item {at} must be an object, got {_short(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"messages: item {at} has role {role!r}; use one of {', '.join(_ROLES)}")
    rendered = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        rendered["content"] = "".join(_part(part, at) for part in content)
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"messages: item {at} has content {_short(content)}; send a string or text parts"
        )
    elif content is None:
        rendered["content"] = ""
    if message.get("tool_calls"):
        rendered["tool_calls"] = [_tool_call(call, at) for call in message["tool_calls"]]
    return rendered


def _part(part: Any, at: int) -> str:  # noqa: ANN401 - any JSON value
    if isinstance(part, dict) and part.get("type") in ("text", "refusal"):
        text = part.get(part["type"])
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise RequestError(
        f"messages: item {at} has a content part of type {_short(kind)}; only text is supported"
    )


def _tool_call(call: Any, at: int) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"messages: item {at} has a tool call without function.name: {_short(call)}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # The API carries arguments as JSON text; templates expect the object.
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(
                f"messages: item {at} has tool call arguments that are no JSON: {error}"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a chat request offers: none for tool_choice none, else those it allows.

    Raises:
        RequestError: they are malformed.
    """
    tools = body.get("tools")
    if not tools or body.get("tool_choice") == "none":
        return None
    if not isinstance(tools, list):
        raise RequestError(f"tools: must be a list, got {_short(tools)}")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools: item {at} has no function.name: {_short(tool)}")
    return _allowed(tools, body.get("tool_choice"))


def _allowed(tools: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Without the tools that tool_choice allowed_tools leaves out: the model never sees them."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools
    said = choice.get("allowed_tools", choice)
    listed = said.get("tools") if isinstance(said, dict) else None
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise RequestError(
            f"tool_choice: allowed_tools.tools must be a list of functions, got {_short(listed)}"
        )
    names = [(tool.get("function") or tool).get("name") for tool in listed]
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in known:
            raise RequestError(f"tool_choice: no tool is called {_short(name)}")
    return [tool for tool in tools if tool["function"]["name"] in names]


def read_flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A boolean field; text such as "true" is taken too, because parameters may come as text.

    Raises:
        RequestError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise RequestError(f"{name}: must be true or false, got {_short(value)}")
    return value


def _refuse_mistaken(body: Mapping[str, Any]) -> None:
    if body.get("input_ids") is not None:
        raise RequestError("input_ids: a chat is rendered from messages; send one of the two")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
