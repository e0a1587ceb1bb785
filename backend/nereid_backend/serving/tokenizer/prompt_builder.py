# SPDX-License-Identifier: Apache-2.0
"""Converts a text or chat messages to the token ids of a prompt."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nereid_backend.errors import ConfigError, ModelError, RequestError
from nereid_backend.fast_imports import importing
from nereid_backend.request_field_checks import shown
from nereid_backend.serving.tokenizer.chat.chat_messages import read_messages
from nereid_backend.serving.tokenizer.chat.chat_template_renderer import ChatTemplateRenderer
from nereid_backend.serving.tokenizer.chat.chat_tools import read_tools
from nereid_backend.serving.tokenizer.chat.thinking_effort import read_template_kwargs
from nereid_backend.serving.tokenizer.request_limits import RequestLimits
from nereid_backend.text.chat_template_files import complete_chat_template
from nereid_backend.text.prompt_encoder import PromptEncoder
from nereid_backend.text.vocabulary_files import (
    check_vocabulary_file,
    describe_tokenizer_error,
)
from nereid_backend.tokenizer_file import apply_tokenizer_file, settings_for_tekken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The type of the default value of a boolean field.
_Default = TypeVar("_Default", bool, None)

_BOOLEAN_TEXTS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine.

    Attributes:
        token_ids: the prompt's tokens.
        text: the prompt's text. None means that the request contained token ids instead of a text.
        images: the packed images for the engine process; b"" if the prompt has no images.
    """

    token_ids: list[int]
    text: str | None
    images: bytes = b""


def load_tokenizer(model: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of the checkpoint in the folder `model`.

    Code of the checkpoint is not run. transformers chooses the class of the tokenizer, and
    `apply_tokenizer_file` then corrects the rules that the class has ignored in tokenizer.json.

    `complete_chat_template` corrects the chat template, for example if the template is in a file of
    the processor.

    Raises:
        ModelError: the folder is missing, its tokenizer cannot be read, or a chat template has a
            wrong type.
    """
    tokenizer_class = _import_tokenizer_class()
    folder = Path(model)
    if not folder.is_dir():
        raise ModelError(
            f"model: {model} is not a folder. Set model to the folder of a checkpoint."
        )
    try:
        tokenizer: PreTrainedTokenizerBase = tokenizer_class.from_pretrained(
            model,
            local_files_only=True,
            trust_remote_code=False,
            **settings_for_tekken(folder),
        )
        apply_tokenizer_file(tokenizer, folder)
    except Exception as error:
        # A broken file can cause any exception in transformers.
        raise ModelError(
            f"model: the tokenizer in {model} cannot be loaded: "
            f"{describe_tokenizer_error(folder, error)}"
        ) from error
    check_vocabulary_file(folder, tokenizer)
    tokenizer.chat_template = complete_chat_template(tokenizer.chat_template, folder)
    return tokenizer


def _import_tokenizer_class() -> Any:  # noqa: ANN401 - transformers' class has no types
    """Import transformers without torch, and return its class AutoTokenizer.

    torch needs much memory and can crash, and this process does not need torch. transformers works
    without torch if the import of torch fails.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type] # Now an import of torch fails.
    with importing():  # This makes the import of transformers about a second faster.
        from transformers import AutoTokenizer
    return AutoTokenizer


class PromptBuilder:
    """Builds prompts with one checkpoint's tokenizer and chat template.

    Attributes:
        limits: the limits on the size of a request.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_model_len: int,
        template_defaults: Mapping[str, Any] | None = None,
        max_image_bytes: int = 0,
    ) -> None:
        """Create a builder.

        Args:
            tokenizer: the checkpoint's tokenizer.
            max_model_len: the length limit of a request in tokens.
            template_defaults: the default values of chat template variables. A request can override
                these values.
            max_image_bytes: the largest total size of the images in the body of a request; 0 if the
                model reads no images.

        Raises:
            ConfigError: a variable of `template_defaults` has a reserved name.
        """
        self._tokenizer = tokenizer
        self._template_defaults = dict(template_defaults or {})
        self._encoder = PromptEncoder(tokenizer, max_model_len)
        self._renderer = ChatTemplateRenderer(tokenizer)
        reserved = sorted(self._renderer.reserved_variables & self._template_defaults.keys())
        if reserved:
            raise ConfigError(
                f"chat_template_kwargs: the name {reserved[0]} is reserved, because the server "
                "sets this variable itself."
            )
        limits_without_images = RequestLimits.derive(
            max_model_len, self._encoder.max_token_bytes, self._min_message_tokens()
        )
        max_request_bytes = limits_without_images.max_request_bytes + max_image_bytes
        self.limits = replace(limits_without_images, max_request_bytes=max_request_bytes)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`. The tokenizer adds no special token at the beginning.

        If the text contains a special token, such as `<|im_end|>`, this special token becomes one
        token id.
        """
        return self._encoder.encode(text)

    def from_text(
        self, text: str, *, add_special_tokens: bool = True, num_kept: int | None = None
    ) -> Prompt:
        """Convert the text of a completion request to a prompt.

        Args:
            text: the text of the prompt.
            add_special_tokens: whether the tokenizer adds its own special tokens to the text.
            num_kept: the number of tokens to keep at the end of the prompt. None keeps all tokens.

        Raises:
            RequestError: the text is too long, or the prompt has no tokens.
        """
        prompt = self._tokenize(text, add_special_tokens, num_kept)
        if not prompt.token_ids:
            raise RequestError(
                "text_input: the text is empty, and this tokenizer adds no special token. Send "
                "at least one character."
            )
        return prompt

    def _tokenize(self, text: str, add_special_tokens: bool, num_kept: int | None) -> Prompt:
        """Convert a text to token ids. If `num_kept` is set, keep only the last `num_kept` ids.

        Raises:
            RequestError: the text is too long.
        """
        # The limit on bytes always applies, because converting a huge text to tokens would take too
        # long.
        self.limits.check_text(text)
        # If the caller has set `num_kept`, surplus tokens are removed below. In this case, the
        # limit on tokens does not apply.
        removes_surplus_tokens = num_kept is not None
        token_ids = self._encoder.encode(
            text, add_special_tokens=add_special_tokens, refuse_overlong=not removes_surplus_tokens
        )
        if num_kept is None or len(token_ids) <= num_kept:
            return Prompt(token_ids, text)
        # Return the text of the kept tokens, because a prompt's text must correspond to its token
        # ids.
        kept_ids = token_ids[-num_kept:]
        return Prompt(kept_ids, str(self._tokenizer.decode(kept_ids)))

    def from_chat(self, body: Mapping[str, Any], num_kept: int | None = None) -> Prompt:
        """Render chat messages with the checkpoint's chat template, and return the prompt.

        Args:
            body: a chat completion request. These fields are read: messages, tools, tool_choice,
                chat_template_kwargs, reasoning_effort, thinking, documents,
                add_generation_prompt, continue_final_message, add_special_tokens.
            num_kept: the number of tokens to keep at the end of the prompt. None keeps all tokens.

        Raises:
            RequestError: a field has a wrong value, the chat exceeds a limit, or the template
                cannot render the messages.
        """
        text = self.render_chat(body)
        # By default, the tokenizer adds no special tokens, because the chat template has added the
        # special tokens to the text.
        add_special_tokens = read_flag(body, "add_special_tokens", default=False)
        return self._tokenize(text, add_special_tokens, num_kept)

    def render_chat(self, body: Mapping[str, Any]) -> str:
        """Render the messages of a chat with the checkpoint's chat template, and return the text.

        Raises:
            RequestError: a field has a wrong value, the chat exceeds a limit, or the template
                cannot render the messages.
        """
        self.limits.check_chat(body)
        messages = read_messages(body, self.limits)
        template_kwargs = self._read_template_kwargs(body)
        continues = _continues_final_message(body)
        if body.get("input_ids") is not None:
            raise RequestError(
                "input_ids: a chat request must not have input_ids, because the prompt is rendered "
                "from messages. Send either messages or input_ids."
            )
        return self._renderer.render(
            messages,
            tools=read_tools(body),
            add_generation_prompt=read_flag(body, "add_generation_prompt", default=not continues),
            continue_final_message=continues,
            **template_kwargs,
        )

    def _read_template_kwargs(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chat template variables from a chat request and from the server's settings.

        A variable of the request overrides the variable of the same name in the settings.

        Raises:
            RequestError: the checkpoint has no chat template, or a variable is wrong or reserved.
        """
        # The source of the template shows which variables the template uses. For example, the field
        # `reasoning_effort` sets the variable `enable_thinking` only if the template uses this
        # variable.
        template_kwargs = read_template_kwargs(body, self._renderer.source())
        for name in template_kwargs:
            if name in self._renderer.reserved_variables:
                raise RequestError(
                    f"chat_template_kwargs: the name {name} is reserved, because the server sets "
                    f"this variable itself. Remove {name}, or send the field of the request that "
                    "has this meaning."
                )
        return self._template_defaults | template_kwargs

    def _min_message_tokens(self) -> int:
        """Return the number of tokens that the chat template adds for a message without text.

        The number limits how many messages a chat can have. Return 1 if there is no chat template,
        or if the template refuses such messages.
        """
        two_messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
        six_messages = two_messages * 3
        try:
            tokens_of_two = self.encode(self._renderer.render(two_messages))
            tokens_of_six = self.encode(self._renderer.render(six_messages))
        except RequestError:
            return 1
        # Some chat templates add a text once for each chat, regardless of the number of messages.
        # Both rendered chats contain this text, so the text does not affect the difference between
        # their numbers of tokens.
        num_added_tokens = len(tokens_of_six) - len(tokens_of_two)
        num_added_messages = len(six_messages) - len(two_messages)
        return max(num_added_tokens // num_added_messages, 1)


def _continues_final_message(body: Mapping[str, Any]) -> bool:
    """Return whether the model must continue the last message instead of beginning a new message.

    Raises:
        RequestError: the request also asks for the beginning of a new message.
    """
    continues = read_flag(body, "continue_final_message", default=False)
    if continues and read_flag(body, "add_generation_prompt", default=False):
        raise RequestError(
            "continue_final_message: continue_final_message=true requires "
            "add_generation_prompt=false, but the request has true for both fields."
        )
    return continues


def read_flag(body: Mapping[str, Any], name: str, *, default: _Default) -> bool | _Default:
    """Return the boolean value of a request field, or `default` if the field is missing.

    The texts "true" and "false" are accepted, too, because Triton request parameters can be texts.

    Raises:
        RequestError: the value is not a boolean.
    """
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        value = _BOOLEAN_TEXTS.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise RequestError(
            f"{name}: the value must be true or false, but the request has {shown(value)}."
        )
    return value
