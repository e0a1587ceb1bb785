# SPDX-License-Identifier: Apache-2.0
"""Builds the prompts of generative rerankers, which answer "yes" or "no".

The prompt contains a query and a document. The score of the document is computed from the logits of
"yes" and "no" for the token after the prompt. The prompt is rendered with the checkpoint's chat
template. If the template supports messages with the roles "query" and "document", one message
contains the query, and another message contains the document. Otherwise one user message contains
an instruction, the query and the document. This is the format in the model card of Qwen3-Reranker
(June 2025).
"""

from enum import Enum, auto
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from nereid_backend.errors import ModelError, RequestError
from nereid_backend.pooling.loading.checkpoint_spec import AnswerTokens

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
# If a prompt with a truncated document is too long, the document is truncated further. The first
# attempt removes no further tokens, the second attempt removes 4, and the third attempt removes 16.
# The first attempt can fail, because the end of the document is tokenised together with the text
# that follows.
_SPARE_TOKENS_OF_ATTEMPTS = (0, 4, 16)


class _Format(Enum):
    """The format in which prompts contain a query and a document."""

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


# The variables of the chat template for all formats other than ROLES.
_USER_MESSAGE_VARIABLES = {"add_generation_prompt": True, "enable_thinking": False}


class GenerativeReranker:
    """Builds the prompts of a generative reranker, and stores the token ids of "yes" and "no".

    Attributes:
        yes: the token id of "yes".
        no: the token id of "no". The score is the logit of "yes" minus the logit of "no". If `no`
            is None, the score is the logit of "yes" alone.
        truncation_side: the end of a document at which `tokens` removes text: "right" or "left".
        reads_instructions: whether the prompts contain an instruction.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        answer_tokens: AnswerTokens | None,
        template_kwargs: dict[str, Any],
        *,
        has_parts: bool = False,
    ) -> None:
        """Determine the token ids of "yes" and "no", and how the prompts are built.

        Args:
            tokenizer: the tokenizer of the checkpoint, with its chat template.
            answer_tokens: the token ids of "yes" and "no" in the files of a checkpoint for
                sentence-transformers. None if the checkpoint is not for sentence-transformers. The
                ids are then looked up in the vocabulary.
            template_kwargs: the variables of the chat template.
            has_parts: whether the checkpoint is a vision-language model, whose template expects a
                list of parts as the content of a message. Templates of other models can expect such
                a list, too.

        Raises:
            ModelError: the tokenizer has no token "yes" or no token "no", or the chat template
                renders no query and no document.
        """
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._has_parts = has_parts
        # Only the files of checkpoints for sentence-transformers contain the answer tokens.
        self._format = self._choose_format(is_for_sentence_transformers=answer_tokens is not None)
        if answer_tokens is not None:
            self.yes, self.no = answer_tokens
        else:
            self.yes, self.no = self._token_id("yes"), self._token_id("no")
        self._set_format_rules(is_vision_model=has_parts)

    def _set_format_rules(self, *, is_vision_model: bool) -> None:
        """Set the attributes that depend on the format of the prompts.

        With the format PAIR, the tokenizer joins the query and the document. It truncates them on
        its own `truncation_side`, and leaves no place for an instruction. With all other formats,
        `tokens` removes the end of the document, and the prompt contains an instruction.

        The prompt of a vision-language model always contains an instruction, because this prompt is
        built from `messages` and with the template of the processor. The tokenizer can lack this
        template, so `_format` can be PAIR although no pair is ever joined.
        """
        is_pair = self._format is _Format.PAIR
        self.truncation_side = self._tokenizer.truncation_side if is_pair else "right"
        self.reads_instructions = is_vision_model or not is_pair

    def _choose_format(self, *, is_for_sentence_transformers: bool) -> _Format:
        """Return the format in which prompts contain the query and the document.

        Without a chat template, the tokenizer of a checkpoint for sentence-transformers joins the
        query and the document. With a template that supports the roles "query" and "document",
        these roles are used. In all other cases, one user message contains the two texts.

        Also set `_has_parts`: whether the template expects a list of parts as the content of a
        message. Example: [{"type": "text", "text": "Hello"}] instead of "Hello".

        Raises:
            ModelError: the template renders the texts in no format.
        """
        if not self._tokenizer.chat_template:
            return _Format.PAIR if is_for_sentence_transformers else _Format.USER_MESSAGE
        is_vision_language = self._has_parts
        for has_parts in dict.fromkeys((is_vision_language, True)):
            self._has_parts = has_parts
            if self._supports_roles(is_for_sentence_transformers=is_for_sentence_transformers):
                return _Format.ROLES
            user_message = {"role": "user", "content": f"{_QUERY_PROBE} {_DOCUMENT_PROBE}"}
            system_message = {"role": "system", "content": _TASK_PROBE}
            probes = (_TASK_PROBE, _QUERY_PROBE, _DOCUMENT_PROBE)
            if self._renders([system_message, user_message], _USER_MESSAGE_VARIABLES, probes):
                return _Format.USER_MESSAGE
            if self._renders([user_message], _USER_MESSAGE_VARIABLES, probes[1:]):
                return _Format.ONLY_USER_MESSAGE
        if is_vision_language:
            # The processor renders the prompts, and can have another template than the tokenizer.
            return _Format.USER_MESSAGE
        raise ModelError(
            "task: reranking with a generative checkpoint requires a chat template that renders "
            "messages of the role user, or of the roles query and document, but the template of "
            "this checkpoint leaves out their content. Correct the template, or use another "
            "checkpoint."
        )

    def _supports_roles(self, *, is_for_sentence_transformers: bool) -> bool:
        """Return whether the template is made for messages with the roles "query" and "document".

        Many templates render any role name, although they were not written for queries and
        documents. These templates render an unknown role in the same way as the roles "query" and
        "document", and the result is False for them. If the checkpoint is for
        sentence-transformers, the unknown role is not tried.
        """
        messages = _role_messages(_ROLES, _QUERY_PROBE, _DOCUMENT_PROBE, None)
        if not self._renders(messages, self._template_kwargs, (_QUERY_PROBE, _DOCUMENT_PROBE)):
            return False
        return is_for_sentence_transformers or not self._renders_unknown_roles_equally()

    def tokens(
        self, pair: tuple[str, str], instruction: str | None, limit: int | None
    ) -> list[int]:
        """Return the token ids of the prompt for a pair.

        Example: a prompt has 120 tokens, and 100 of them belong to the document. If the limit is
        80, only the first 60 tokens of the document stay in the prompt.

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
        ids = self._encode(self._render(query, document, instruction))
        if limit is None or len(ids) <= limit:
            return ids
        return self._truncated_tokens(query, document, instruction, limit)

    def _truncated_tokens(
        self, query: str, document: str, instruction: str | None, limit: int
    ) -> list[int]:
        """Return the token ids of a prompt with a truncated document.

        Example: the limit is 80, and the prompt without the document has 20 tokens. The first
        attempt keeps 60 tokens of the document.

        Args:
            query: the query.
            document: the document, which is too long.
            instruction: a sentence that describes which documents are relevant; None means the
                default sentence.
            limit: the largest number of tokens of the prompt.

        Raises:
            RequestError: no token of the document fits, or the prompt of each attempt is too long.
        """
        num_without_document = len(self._encode(self._render(query, "", instruction)))
        document_ids = self._encode(document)
        # In the prompt, the end of the document is tokenised together with the text that follows.
        # The prompt can therefore be a few tokens too long. The next attempt then keeps fewer
        # tokens of the document.
        for num_spare in _SPARE_TOKENS_OF_ATTEMPTS:
            num_kept = limit - num_without_document - num_spare
            if num_kept <= 0:
                break
            truncated = str(self._tokenizer.decode(document_ids[:num_kept]))
            ids = self._encode(self._render(query, truncated, instruction))
            if len(ids) <= limit:
                return ids
        # Either no token of the document fits, or the prompt of each attempt is too long. A shorter
        # query helps in both cases, because it leaves more tokens for the document.
        raise RequestError(
            f"input: the query and the instruction have {num_without_document} tokens without the "
            f"document, but the limit is {limit} (max_model_len). Shorten the query."
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
        messages, variables = self.messages(query, document, instruction)
        if not self._tokenizer.chat_template:
            return "".join(f"{message['content']}\n" for message in messages)
        return self._template(messages, **variables)

    def messages(
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
            return _role_messages(_ROLES, query, document, instruction), self._template_kwargs
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
        """Return whether the template renders the messages, and the result contains all probes."""
        text = self._try_to_render(messages, variables)
        return all(probe in text for probe in probes)

    def _renders_unknown_roles_equally(self) -> bool:
        """Return whether the template treats the roles "query" and "document" like unknown roles.

        Example: a template that renders each message as "<role>content" renders unknown roles, too.
        The two texts then differ only in the names of the roles.
        """
        text, text_of_unknown_roles = (
            self._try_to_render(
                _role_messages(roles, _QUERY_PROBE, _DOCUMENT_PROBE, None), self._template_kwargs
            )
            for roles in (_ROLES, _UNKNOWN_ROLES)
        )
        for role, unknown_role in zip(_ROLES, _UNKNOWN_ROLES, strict=True):
            text_of_unknown_roles = text_of_unknown_roles.replace(unknown_role, role)
        return text_of_unknown_roles == text

    def _try_to_render(self, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
        """Return the rendered messages; "" if the template does not support the messages."""
        try:
            return self._template(messages, **variables)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return ""

    def _template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:  # noqa: ANN401
        """Render messages with the chat template, and return the text."""
        rendered: list[Any] = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if self._has_parts
            else message
            for message in messages
        ]
        return str(self._tokenizer.apply_chat_template(rendered, tokenize=False, **kwargs))

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt or of a document."""
        # If there is a chat template, the rendered text already contains the special tokens.
        encoded: Any = self._tokenizer(
            text, add_special_tokens=not self._tokenizer.chat_template, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def _token_id(self, word: str) -> int:
        """Return the id of the token `word`. Raise a ModelError if there is no such token."""
        token_id = self._tokenizer.get_vocab().get(word)
        if token_id is None:
            raise ModelError(
                f'task: reranking with a generative checkpoint requires the token "{word}", but '
                "this tokenizer lacks it. Choose another checkpoint."
            )
        return int(token_id)


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
