# SPDX-License-Identifier: Apache-2.0
"""Converts texts and pairs to prompts, which the checkpoint's chat template renders.

Three types of models need such prompts:
- Generative rerankers answer "yes" or "no" after the prompt. If the template supports messages with
  the roles "query" and "document", one message contains the query, and another message contains the
  document. Otherwise one user message contains an instruction, the query and the document. This is
  the format in the model card of Qwen3-Reranker (June 2025).
- The head of a cross-encoder computes a score of the prompt. The template must support the roles
  "query" and "document".
- An embedding model computes the vector of a prompt with one user message, which is the text.

sentence-transformers 6 saves the last two types of models if the tokenizer has a chat template.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from transformers import PreTrainedTokenizerBase

from nereid_backend.errors import ModelError, RequestError
from nereid_backend.pooling.inputs.message_template import MessageTemplate
from nereid_backend.pooling.loading.checkpoint_spec import (
    CAUSAL,
    IMAGE_CAUSAL,
    SEQUENCE,
    CheckpointSpec,
)

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_ROLES = ("query", "document")
# Texts that do not occur in any template. A template is rendered with these texts as the task, the
# query and the document. If one of the texts is missing in the result, the template does not
# support the roles of the messages, or expects the content of a message in another form.
_TASK_PROBE = "mark7task7mark"
_QUERY_PROBE = "mark7query7mark"
_DOCUMENT_PROBE = "mark7document7mark"
# Roles that no template supports.
_UNKNOWN_ROLES = ("role7query", "role7document")
# If a prompt with a truncated text is too long, the text is truncated further. The first attempt
# removes no further tokens, the second attempt removes 4, and the third attempt removes 16. The
# first attempt can fail, because the end of the text is tokenised together with the text that
# follows.
_SPARE_TOKENS_OF_ATTEMPTS = (0, 4, 16)


class _Format(Enum):
    """The format in which prompts contain a text, or a query and a document."""

    PAIR = auto()
    """The tokenizer joins the query and the document. There is no prompt."""
    ROLES = auto()
    """The chat template renders two messages with the roles "query" and "document"."""
    USER_MESSAGE = auto()
    """A system message contains the task. A user message contains an instruction, the query and the
    document."""
    ONLY_USER_MESSAGE = auto()
    """Like USER_MESSAGE, but the user message also contains the task, because the chat template
    renders no system message."""
    TEXT = auto()
    """A user message contains one text. There are no pairs."""


# The variables of the chat template for all formats other than ROLES.
_USER_MESSAGE_VARIABLES = {"add_generation_prompt": True, "enable_thinking": False}


def create_text_prompts(
    spec: CheckpointSpec, tokenizer: PreTrainedTokenizerBase
) -> "TextPrompts | None":
    """Return the object that converts inputs to prompts; None if inputs are tokenised directly.

    Raises:
        ModelError: the chat template is missing, or renders no texts or pairs.
    """
    if spec.loader in (CAUSAL, IMAGE_CAUSAL) or spec.renders_messages:
        return TextPrompts(spec, tokenizer)
    return None


class TextPrompts:
    """Converts texts and pairs of texts to the token ids of prompts.

    Attributes:
        truncation_side: the end at which a text or a document is truncated: "right" or "left".
        reads_instructions: whether the prompts of pairs contain an instruction.
    """

    def __init__(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerBase) -> None:
        """Determine the format of the prompts.

        Args:
            spec: the description of the checkpoint.
            tokenizer: the tokenizer of the checkpoint, with its chat template.

        Raises:
            ModelError: the chat template is missing, or renders no texts or pairs.
        """
        self._spec = spec
        self._tokenizer = tokenizer
        # The compiled chat template; None if the tokenizer has none.
        name = str(spec.template_kwargs.get("chat_template", "default"))
        self._template = MessageTemplate.compile(spec.folder, tokenizer, name)
        # Whether the template expects a list of parts as the content of a message. Example:
        # [{"type": "text", "text": "Hello"}] instead of "Hello". Templates of vision-language
        # models expect such a list, but templates of other models can expect it, too.
        self._has_parts = False
        self._format = self._choose_format()
        self._set_format_rules(is_vision_model=spec.loader == IMAGE_CAUSAL)
        user_message = {"role": "user", "content": _QUERY_PROBE}
        self._renders_texts = self._renders([user_message], spec.template_kwargs, (_QUERY_PROBE,))

    def _set_format_rules(self, *, is_vision_model: bool) -> None:
        """Set the attributes that depend on the format of the prompts.

        With the format PAIR, the tokenizer joins the query and the document. It truncates them on
        its own `truncation_side`, and leaves no place for an instruction. With all other formats,
        the end of the text or of the document is removed, and the prompt of a pair contains an
        instruction.

        The prompt of a vision-language model always contains an instruction, because this prompt is
        built from `pair_messages` and with the template of the processor. The tokenizer can lack
        this template, so `_format` can be PAIR although no pair is ever joined.
        """
        is_pair = self._format is _Format.PAIR
        self.truncation_side = self._tokenizer.truncation_side if is_pair else "right"
        has_instructions = self._format not in (_Format.PAIR, _Format.TEXT)
        self.reads_instructions = is_vision_model or has_instructions

    def _choose_format(self) -> _Format:
        """Return the format of the prompts. Also set `_has_parts`.

        If the files of a checkpoint for sentence-transformers exclude messages, the tokenizer joins
        the query and the document.

        Raises:
            ModelError: the template is missing, or renders the texts in no format.
        """
        spec = self._spec
        has_answer_tokens = spec.answer_tokens is not None
        if has_answer_tokens and not spec.renders_messages and not spec.takes_messages:
            return _Format.PAIR
        if self._template is None and not spec.renders_messages:
            return _Format.USER_MESSAGE
        for has_parts in self._content_forms():
            self._has_parts = has_parts
            chosen = self._format_of_template() if self._template is not None else None
            if chosen is not None:
                return chosen
        if spec.loader == IMAGE_CAUSAL:
            # The processor renders the prompts, and can have another template than the tokenizer.
            self._has_parts = True
            return _Format.USER_MESSAGE
        problem = (
            "the template of this checkpoint leaves out their content. Correct the template"
            if self._template is not None
            else "the checkpoint has no chat template. Add a chat_template.jinja"
        )
        raise ModelError(
            f"task: {spec.folder} requires a chat template that renders messages of "
            f"{self._required_roles()}, but {problem}, or use another checkpoint."
        )

    def _content_forms(self) -> tuple[bool, ...]:
        """Return the values of `_has_parts` to try. The form in the checkpoint's files is first."""
        if self._spec.loader == IMAGE_CAUSAL or self._spec.message_format == "structured":
            return (True,)
        return (False,) if self._spec.message_format == "flat" else (False, True)

    def _required_roles(self) -> str:
        """Return the roles of the messages that the template must render, for an error message."""
        if self._spec.task == "embed":
            return "the role user"
        if self._spec.loader == SEQUENCE:
            return "the roles query and document"
        return "the role user, or of the roles query and document"

    def _format_of_template(self) -> _Format | None:
        """Return the format that the chat template supports; None if there is no such format.

        With a template that supports the roles "query" and "document", these roles are used. In all
        other cases, one user message of a generative reranker contains the two texts.
        """
        user_message = {"role": "user", "content": f"{_QUERY_PROBE} {_DOCUMENT_PROBE}"}
        system_message = {"role": "system", "content": _TASK_PROBE}
        probes = (_TASK_PROBE, _QUERY_PROBE, _DOCUMENT_PROBE)
        if self._spec.task == "embed":
            is_rendered = self._renders([user_message], self._spec.template_kwargs, probes[1:])
            return _Format.TEXT if is_rendered else None
        if self._supports_roles():
            return _Format.ROLES
        if self._spec.loader == SEQUENCE:
            return None
        if self._renders([system_message, user_message], _USER_MESSAGE_VARIABLES, probes):
            return _Format.USER_MESSAGE
        if self._renders([user_message], _USER_MESSAGE_VARIABLES, probes[1:]):
            return _Format.ONLY_USER_MESSAGE
        return None

    def _supports_roles(self) -> bool:
        """Return whether the template is made for messages with the roles "query" and "document".

        Many templates render any role name, although they were not written for queries and
        documents. These templates render an unknown role in the same way as the roles "query" and
        "document", and the result is False for them. If the files of sentence-transformers require
        messages, the unknown role is not tried.
        """
        messages = _role_messages(_ROLES, _QUERY_PROBE, _DOCUMENT_PROBE, None)
        probes = (_QUERY_PROBE, _DOCUMENT_PROBE)
        if not self._renders(messages, self._spec.template_kwargs, probes):
            return False
        requires_messages = self._spec.renders_messages or self._spec.answer_tokens is not None
        return requires_messages or not self._renders_unknown_roles_equally()

    def text_tokens(
        self, text: str, prompt: str | None, prompt_name: str | None, limit: int | None
    ) -> list[int]:
        """Return the token ids of the prompt for one text.

        Example: a template renders each message as "role: content;". For the text "a" and the
        prompt "b", the result is the token ids of "system: b;user: a;".

        Args:
            text: the text, which becomes a user message.
            prompt: the text of a system message; None means that there is no system message.
            prompt_name: the name of the prompt. If the name is "query" or "document", the chat
                template gets the name as the variable `task`, as in sentence-transformers.
            limit: the largest number of tokens. If the prompt has more tokens, the end of `text` is
                removed. None means no limit.

        Raises:
            RequestError: the prompt is longer than the limit even without the text, or the chat
                template renders only pairs.
        """
        template = self._template
        if template is None or not self._renders_texts:
            raise RequestError(
                "input: the chat template of this checkpoint renders only pairs of a query and a "
                "document, but the input is a single text. Send a pair."
            )
        task = {"task": prompt_name} if prompt_name in _ROLES else {}

        def render(text: str) -> str:
            messages = [{"role": "user", "content": text}]
            if prompt is not None:
                messages.insert(0, {"role": "system", "content": prompt})
            variables = {**task, **self._spec.template_kwargs}
            return template.render(messages, variables, has_parts=self._has_parts)

        return self._limited_tokens(render, text, limit)

    def pair_tokens(
        self, pair: tuple[str, str], instruction: str | None, limit: int | None
    ) -> list[int]:
        """Return the token ids of the prompt for a pair.

        Args:
            pair: the query and the document.
            instruction: a sentence that describes which documents are relevant. None means the
                default sentence.
            limit: the largest number of tokens. If the prompt has more tokens, the end of the
                document is removed. None means no limit.

        Raises:
            RequestError: the prompt is longer than the limit even without the document.
        """
        query, document = pair
        if self._format is _Format.PAIR:
            return self._encode_pair(query, document, limit)
        return self._limited_tokens(
            lambda document: self._render(query, document, instruction), document, limit
        )

    def _limited_tokens(
        self, render: Callable[[str], str], text: str, limit: int | None
    ) -> list[int]:
        """Return the token ids of a prompt. If the prompt is too long, truncate a text in it.

        Example: a prompt has 120 tokens, and 100 of them belong to the text. If the limit is 80,
        only the first 60 tokens of the text stay in the prompt.

        Args:
            render: a function that returns the prompt with a text.
            text: the text.
            limit: the largest number of tokens of the prompt; None means no limit.

        Raises:
            RequestError: no token of the text fits, or the prompt of each attempt is too long.
        """
        ids = self._encode(render(text))
        if limit is None or len(ids) <= limit:
            return ids
        num_without_text = len(self._encode(render("")))
        text_ids = self._encode(text)
        # In the prompt, the end of the text is tokenised together with the text that follows. The
        # prompt can therefore be a few tokens too long. The next attempt then keeps fewer tokens.
        for num_spare in _SPARE_TOKENS_OF_ATTEMPTS:
            num_kept = limit - num_without_text - num_spare
            if num_kept <= 0:
                break
            ids = self._encode(render(str(self._tokenizer.decode(text_ids[:num_kept]))))
            if len(ids) <= limit:
                return ids
        # Either no token of the text fits, or the prompt of each attempt is too long. A shorter
        # query or prompt helps in both cases, because it leaves more tokens for the text.
        if self._format is _Format.TEXT:
            parts, remedy = "the prompt and the chat template have", "Shorten the prompt"
            text_name = "text"
        else:
            parts, remedy = "the query and the instruction have", "Shorten the query"
            text_name = "document"
        raise RequestError(
            f"input: {parts} {num_without_text} tokens without the {text_name}, but the limit is "
            f"{limit} (max_model_len). {remedy}."
        )

    def _encode_pair(self, query: str, document: str, limit: int | None) -> list[int]:
        """Tokenise a pair without a prompt, and return at most `limit` token ids."""
        truncation: dict[str, Any] = {}
        if limit is not None:
            truncation = {"truncation": "longest_first", "max_length": limit}
        # The tokenizer gets lists, because it would ignore an empty document that is not in a list.
        encoded: Any = self._tokenizer([query], [document], verbose=False, **truncation)
        ids: list[int]
        (ids,) = encoded["input_ids"]
        return ids

    def _render(self, query: str, document: str, instruction: str | None) -> str:
        """Return the text of the prompt."""
        messages, variables = self.pair_messages(query, document, instruction)
        if self._template is None:
            return "".join(f"{message['content']}\n" for message in messages)
        return self._template.render(messages, variables, has_parts=self._has_parts)

    def pair_messages(
        self, query: str, document: str, instruction: str | None
    ) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Return the messages and the variables from which the chat template builds the prompt.

        If the template supports the roles "query" and "document", the variables are those in the
        checkpoint's files. Example: for the query "a" and the document "b", the messages are
        [{"role": "query", "content": "a"}, {"role": "document", "content": "b"}]. An instruction
        becomes a system message before these messages. The last message ends with the document.

        If the template does not support the roles, a system message contains the task, and one user
        message contains the instruction, the query and the document. If the template renders no
        system message, the user message begins with the task. The variables are
        {"add_generation_prompt": True, "enable_thinking": False}.
        """
        if self._format is _Format.ROLES:
            return _role_messages(_ROLES, query, document, instruction), self._spec.template_kwargs
        # This format and these variables of the chat template come from the model card of
        # Qwen3-Reranker. The variables in the checkpoint's files are not used, because they are
        # meant for the format "roles".
        text = (
            f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        )
        if self._format is _Format.ONLY_USER_MESSAGE:
            messages = [{"role": "user", "content": f"{_SYSTEM}\n\n{text}"}]
        else:
            messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
        return messages, _USER_MESSAGE_VARIABLES

    def _renders(
        self, messages: list[dict[str, str]], variables: dict[str, Any], probes: tuple[str, ...]
    ) -> bool:
        """Return whether all probes, such as `_QUERY_PROBE`, occur in the rendered messages.

        If the template does not support the messages, return False.
        """
        text = self._try_to_render(messages, variables)
        return all(probe in text for probe in probes)

    def _renders_unknown_roles_equally(self) -> bool:
        """Return whether the template treats the roles "query" and "document" like unknown roles.

        Example: a template that renders each message as "<role>content" renders unknown roles, too.
        The two texts then differ only in the names of the roles.
        """
        text, text_of_unknown_roles = (
            self._try_to_render(
                _role_messages(roles, _QUERY_PROBE, _DOCUMENT_PROBE, None),
                self._spec.template_kwargs,
            )
            for roles in (_ROLES, _UNKNOWN_ROLES)
        )
        for role, unknown_role in zip(_ROLES, _UNKNOWN_ROLES, strict=True):
            text_of_unknown_roles = text_of_unknown_roles.replace(unknown_role, role)
        return text_of_unknown_roles == text

    def _try_to_render(self, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
        """Return the rendered messages; "" if the template does not support the messages."""
        if self._template is None:
            return ""
        try:
            return self._template.render(messages, variables, has_parts=self._has_parts)
        except RequestError:
            return ""

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt or of a document."""
        # If there is a chat template, the rendered text already contains the special tokens.
        encoded: Any = self._tokenizer(
            text, add_special_tokens=self._template is None, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids


def _role_messages(
    roles: tuple[str, str], query: str, document: str, instruction: str | None
) -> list[dict[str, str]]:
    """Return two or three messages: the instruction (if there is one), the query and the document.

    Example: the roles ("query", "document"), the query "a", the document "b" and no instruction
    return [{"role": "query", "content": "a"}, {"role": "document", "content": "b"}]. An instruction
    is added as a system message before these messages.
    """
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, (query, document), strict=True)
    ]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    return messages
