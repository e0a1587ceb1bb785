# SPDX-License-Identifier: Apache-2.0
"""Generative rerankers: a pair becomes one text, and the answer "yes" or "no" is its score.

The text comes from the checkpoint's own chat template: as the messages "query" and "document" where
the template renders these, else as an instruction, a query and a document in a user's message.
Wording and layout of the latter are those that the Qwen3-Reranker model card documents (June 2025).
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from nereid_backend.errors import ModelError, RequestError

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_ROLES = ("query", "document")
_QUERY_MARK, _DOCUMENT_MARK = "mark7query7mark", "mark7document7mark"


class Judge:
    """Makes texts of pairs, and knows the tokens that are the answers.

    Attributes:
        yes: the token whose logit is the score.
        no: the token whose logit is taken off it, None: nothing is.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        answers: tuple[int, int | None] | None,
        template_kwargs: dict[str, Any],
    ) -> None:
        """Find the template and the answers.

        Args:
            tokenizer: of the checkpoint, with its chat template.
            answers: the tokens' ids where the files name them, else "yes" and "no".
            template_kwargs: what the files say that the template is called with.

        Raises:
            ModelError: the tokenizer has no single tokens "yes" and "no".
        """
        self._tokenizer = tokenizer
        self.yes, self.no = answers or (self._answer("yes"), self._answer("no"))
        self._template_kwargs = template_kwargs
        # A checkpoint whose files name the answers was trained with sentence-transformers, which
        # joins the two as the tokenizer joins pairs when there is no template.
        self._joins = answers is not None and not tokenizer.chat_template
        self._has_roles = False
        if tokenizer.chat_template:
            self._has_roles = self._renders_roles(named=answers is None)

    def tokens(
        self, pair: tuple[str, str], instruction: str | None, limit: int | None
    ) -> list[int]:
        """Ids of the text that asks about a pair.

        Args:
            pair: query and document.
            instruction: what makes a document relevant.
            limit: cut the document's end so that the text has at most so many tokens.

        Raises:
            RequestError: the text without the document is longer than the limit.
        """
        query, document = pair
        if self._joins:
            return self._join(query, document, limit)
        ids = self._encode(self._render(query, document, instruction))
        if limit is None or len(ids) <= limit:
            return ids
        empty = len(self._encode(self._render(query, "", instruction)))
        body = self._encode(document)
        # Tokens at the seams may join, so the cut is tried and, if need be, made deeper.
        for spare in (0, 4, 16):
            keep = limit - empty - spare
            if keep <= 0:
                break
            cut = self._tokenizer.decode(body[:keep])
            ids = self._encode(self._render(query, str(cut), instruction))
            if len(ids) <= limit:
                return ids
        raise RequestError(
            f"input: the query and the instruction have {empty} tokens without the document; the "
            f"limit is {limit} (max_model_len)"
        )

    def _join(self, query: str, document: str, limit: int | None) -> list[int]:
        cut: dict[str, Any] = {}
        if limit is not None:
            cut = {"truncation": "longest_first", "max_length": limit}
        encoded: Any = self._tokenizer(query, document, verbose=False, **cut)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _render(self, query: str, document: str, instruction: str | None) -> str:
        if self._has_roles:
            return self._render_roles(query, document, instruction)
        text = (
            f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        )
        if not self._tokenizer.chat_template:
            return f"{_SYSTEM}\n{text}\n"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
        return self._template(messages, add_generation_prompt=True, enable_thinking=False)

    def _renders_roles(self, *, named: bool) -> bool:
        """Whether the template renders messages of the roles "query" and "document".

        Args:
            named: whether it must know them; many templates pass any role through.
        """
        marks = (_QUERY_MARK, _DOCUMENT_MARK)
        text = self._render_roles(*marks, None)
        if not all(mark in text for mark in marks):
            return False
        others = ("role7query", "role7document")
        passed = self._render_roles(*marks, None, others)
        for role, other in zip(_ROLES, others, strict=True):
            passed = passed.replace(other, role)
        return passed != text or not named

    def _render_roles(
        self,
        query: str,
        document: str,
        instruction: str | None,
        roles: tuple[str, str] = _ROLES,
    ) -> str:
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles, (query, document), strict=True)
        ]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        try:
            return self._template(messages, **self._template_kwargs)
        except Exception:  # noqa: BLE001 - a template raises what it likes about roles
            return ""

    def _template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:  # noqa: ANN401
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))

    def _encode(self, text: str) -> list[int]:
        # A template writes its special tokens itself.
        encoded: Any = self._tokenizer(
            text, add_special_tokens=not self._tokenizer.chat_template, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def _answer(self, word: str) -> int:
        found = self._tokenizer.get_vocab().get(word)
        if found is None:
            raise ModelError(
                f'task: reranking with a generative checkpoint takes a tokenizer with the token "'
                f'{word}", and this one has none'
            )
        return int(found)
