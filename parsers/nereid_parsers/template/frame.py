r"""Determine the text that opens the model's turn, by comparing generation prompts and answers.

Example: the generation prompt `<|im_start|>assistant\n<think>\n` consists of two parts. Every
assistant message has the header `<|im_start|>assistant\n`. The rest, `<think>\n`, belongs to the
model's answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    EOS_TOKEN,
    ONE_CALL,
    RESULT_TEXT,
    USER_TEXT,
    AssistantMessage,
    Conversation,
    Switches,
)
from nereid_parsers.template.difference import (
    MARKER,
    Comparison,
    closing_spellings,
    common_prefix,
    drop_common_suffix,
    markers,
    text_after_last,
    tokens,
)
from nereid_parsers.template.probe import Prober

_USER_WORD = re.compile(r"\w*user\w*", re.IGNORECASE)
_WORDS = re.compile(r"(\w+)")
_MAX_USER_HEADER = 80  # characters

# Conversations that end with an answer. The header of the model's turn occurs in all of them.
_ANSWERED = (
    Conversation(AssistantMessage(CONTENT_TEXT)),
    Conversation(AssistantMessage(CONTENT_TEXT), user_replies=True),
    Conversation(AssistantMessage(calls=ONE_CALL), tools=True),
)
_PROMPT_AFTER_RESULT = Conversation(generation_prompt=True, tools=True, after_tool_result=True)


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    r"""A prompt that was rendered with a generation prompt.

    Attributes:
        switches: The switches with which the prompt was rendered.
        text: The whole prompt.
        after_header: The text after the header of the model's turn: `"<think>\n"`, or "".
    """

    switches: Switches
    text: str
    after_header: str


@dataclass(slots=True)
class TurnFrame:
    r"""The text around the model's answer in a rendered conversation.

    Attributes:
        prober: Renders the conversations.
        header: The text that opens the model's turn: `"<|im_start|>assistant\n"`.
        prompts: The generation prompts, one for each setting of the switches that the template
            renders. The first one is the default.
        end_markers: The markers that end a turn: `("<|im_end|>",)`.
        trailing_text: The text that the template writes after the last message: `"<|im_end|>\n"`.
        inner_headers: Headers that the model writes itself between two parts of one message.
    """

    prober: Prober
    header: str = ""
    prompts: list[GenerationPrompt] = field(default_factory=list)
    end_markers: tuple[str, ...] = ()
    trailing_text: str = ""
    inner_headers: tuple[str, ...] = ()

    def text_after_header(self, conversation: Conversation) -> str | None:
        r"""Return the text after the header of the model's turn in a rendered conversation.

        Return None if the template refuses to render the conversation. Example: the rendering
        "... <|im_start|>assistant\nHello<|im_end|>\n" gives "Hello<|im_end|>\n".
        """
        text = self.prober.render(conversation)
        if text is None:
            return None
        has_result = conversation.after_tool_result and RESULT_TEXT in text
        rest = text_after_last(text, RESULT_TEXT if has_result else USER_TEXT)
        header = self._header_in(rest)
        if header:
            _, _, after_header = rest.partition(header)
            return after_header
        # Without a header, the answer starts where the user's message ends.
        return rest[len(common_prefix(rest, self.trailing_text)) :]

    def generated_text(self, conversation: Conversation) -> str | None:
        r"""Return the text that a model would generate for the answer of a conversation.

        This is the text after the header, without the markers that end the turn. Example: the
        rendering "... <|im_start|>assistant\nHello<|im_end|>\n" gives "Hello".
        """
        text = self.text_after_header(conversation)
        if text is None:
            return None
        return self.without_end_markers(drop_common_suffix(text, self.trailing_text))

    def prompt_after_header(self, prompt: str) -> str:
        r"""Return the text of a prompt after the header of the model's turn.

        Example: the prompt "... <|im_start|>assistant\n<think>\n" gives "<think>\n".
        """
        rest = text_after_last(prompt, USER_TEXT)
        header = self._header_in(rest)
        return text_after_last(rest, header) if header else ""

    def _header_in(self, text: str) -> str:
        """Return the header as `text` contains it, with or without the surrounding white space.

        Return "" if `text` does not contain the header.
        """
        if self.header in text:
            return self.header
        bare = self.header.strip()
        return bare if bare in text else ""

    def without_end_markers(self, text: str) -> str:
        r"""Return `text` without the markers at its end that end a turn.

        Example: if `<|im_end|>` ends a turn, "Hello<|im_end|>\n" gives "Hello".
        """
        return _strip_suffixes(text, (*self.end_markers, EOS_TOKEN))


def _strip_suffixes(text: str, suffixes: Sequence[str]) -> str:
    r"""Remove the suffixes from the end of `text`, with the white space after each of them.

    >>> _strip_suffixes("Hello\n<e1>\n<e2>\n", ("<e1>", "<e2>"))
    'Hello\n'
    """
    while True:
        bare = text.rstrip()
        suffix = next((suffix for suffix in suffixes if bare.endswith(suffix)), "")
        if not suffix:
            return text
        text = bare[: len(bare) - len(suffix)]


def _strip_prefixes(text: str, prefixes: Sequence[str]) -> str:
    r"""Remove the prefixes from the start of `text`, with the white space after each of them.

    >>> _strip_prefixes("<end>\n<start>assistant", ("<end>",))
    '<start>assistant'
    """
    while True:
        prefix = next((prefix for prefix in prefixes if text.startswith(prefix)), "")
        if not prefix:
            return text
        text = text[len(prefix) :].lstrip()


# ---- the generation prompt ----------------------------------------------------------------------


def compare_generation_prompt(prober: Prober) -> tuple[TurnFrame, Comparison]:
    r"""Compare a conversation without and with the generation prompt (G).

    The text that the generation prompt adds opens the model's turn. Example: the added text is
    "<|im_start|>assistant\n<think>\n", but messages without reasoning contain only
    "<|im_start|>assistant\n". This common part is the header.
    """
    frame = TurnFrame(prober)
    without_prompt = prober.render(Conversation()) or ""
    with_prompt = prober.render(Conversation(generation_prompt=True)) or without_prompt
    frame.trailing_text = text_after_last(without_prompt, USER_TEXT)
    answers = _rendered_answers(prober)
    prompts = _rendered_prompts(prober)
    added = with_prompt[len(common_prefix(without_prompt, with_prompt)) :]
    if added.strip():
        prompt_ends = [text_after_last(text, USER_TEXT) for _, text in prompts]
        header = _header_in_prompt(added, [*answers, *prompt_ends])
    else:
        # The template ignores add_generation_prompt, so only the answers can show a header.
        header = _shortest_prefix(text_after_last(with_prompt, USER_TEXT), answers)
    header = _drop_thinking_block(header, answers)
    frame.header = _drop_text_after_role(header, without_prompt)
    frame.prompts = [
        GenerationPrompt(switches, text, frame.prompt_after_header(text))
        for switches, text in prompts
    ]
    finding = f"The turn opens with {frame.header!r}."
    if frame.prompts and frame.prompts[0].after_header:
        finding += f" The prompt continues with {frame.prompts[0].after_header!r}."
    comparison = Comparison(
        "G generation prompt",
        "add_generation_prompt is true.",
        without_prompt,
        with_prompt,
        finding,
    )
    return frame, comparison


def _rendered_answers(prober: Prober) -> list[str]:
    """Return the text after the user's question in each rendered conversation with an answer."""
    answers = []
    for conversation in _ANSWERED:
        text = prober.render(conversation)
        if text is not None and USER_TEXT in text:
            answers.append(text_after_last(text, USER_TEXT).replace(EOS_TOKEN, ""))
    return answers


def _rendered_prompts(prober: Prober) -> list[tuple[Switches, str]]:
    """Return the prompt for each setting of the switches that the template renders."""
    prompts = []
    for switches in prober.thinking_switches():
        text = prober.render(Conversation(generation_prompt=True, switches=switches))
        if text is not None:
            prompts.append((switches, text))
    return prompts


def _header_in_prompt(added: str, renderings: list[str]) -> str:
    r"""Return the part of a generation prompt that all renderings of the model's turn contain.

    >>> _header_in_prompt("<|a|>\n<think>\n", ["<|a|>\nHello", "<|a|>\n<think>\n"])
    '<|a|>\n'

    Args:
        added: The text that the generation prompt adds.
        renderings: Other renderings of the model's turn. A rendering that contains no part of
            `added` is ignored.
    """
    shared = [_longest_shared_prefix(added, rendering) for rendering in renderings]
    return min((prefix for prefix in shared if prefix.strip()), key=len, default=added)


def _longest_shared_prefix(added: str, rendering: str) -> str:
    r"""Return the longest prefix of `added` that occurs anywhere in `rendering`.

    The prefix does not cut a token in two. White space alone does not count as a prefix. The result
    is "" if no prefix occurs.

    >>> _longest_shared_prefix("<|assistant|>\n<think>\n", "\n<|assistant|>\nHello")
    '<|assistant|>\n'
    """
    pieces = tokens(added)
    for count in range(len(pieces), 0, -1):
        prefix = "".join(pieces[:count])
        if prefix.strip() and prefix in rendering:
            return prefix
    return ""


def _shortest_prefix(text: str, renderings: list[str]) -> str:
    """Return the shortest of the common prefixes of `text` and each rendering.

    >>> _shortest_prefix("<|a|><think>", ["<|a|><think>Hello", "<|a|>Hello"])
    '<|a|>'
    """
    prefixes = [common_prefix(text, rendering) for rendering in renderings]
    return min(prefixes, key=len, default="")


def _drop_thinking_block(header: str, answers: list[str]) -> str:
    """Remove an empty block of reasoning, or its opening marker, from the end of `header`.

    If all prompts and answers contain an empty block of reasoning, the block seems to belong to the
    header. The closing marker is in the header, or directly after the header.

    >>> _drop_thinking_block("<|assistant|><think></think>", [])
    '<|assistant|>'
    >>> answer = f"<|assistant|><think></think>{CONTENT_TEXT}"
    >>> _drop_thinking_block("<|assistant|><think>", [answer])
    '<|assistant|>'
    """
    header_markers = markers(header)
    if len(header_markers) > 1:
        opening, closing = header_markers[-2:]
        block_at = header.rfind(opening)
        is_empty = _without_space(header[block_at:]) == _without_space(opening + closing)
        if is_empty and closing in closing_spellings(opening):
            return header[:block_at]
    if not header_markers or not header.rstrip().endswith(header_markers[-1]):
        return header
    if _is_closed_in_answers(header.strip(), header_markers[-1], answers):
        return header[: header.rfind(header_markers[-1])]
    return header


def _without_space(text: str) -> str:
    return "".join(text.split())


def _is_closed_in_answers(header: str, opening: str, answers: list[str]) -> bool:
    """Return whether, in any answer, the marker that closes `opening` directly follows the header.

    Example: for the header "<|assistant|><think>", the answer "<|assistant|><think></think>Hello"
    contains such a marker.
    """
    closings = tuple(closing_spellings(opening))
    for answer in answers:
        if CONTENT_TEXT in answer and header in answer:
            after_header = answer[answer.find(header) + len(header) :]
            if after_header.lstrip().startswith(closings):
                return True
    return False


def _drop_text_after_role(header: str, without_prompt: str) -> str:
    r"""Return `header` up to the end of the structure that a user message's header has.

    If every prompt and every answer continues with `<think>`, this marker seems to belong to the
    header. The user's header shows where the model's header really ends.

    >>> _drop_text_after_role("<|start|>assistant\n<think>\n", f"<|start|>user\n{USER_TEXT}")
    '<|start|>assistant\n'
    """
    before_question = without_prompt[: without_prompt.rfind(USER_TEXT)][-_MAX_USER_HEADER:]
    user_words = list(_USER_WORD.finditer(before_question))
    if not user_words:
        return header
    role_at = user_words[-1].start()
    starts = [
        marker.start() for marker in MARKER.finditer(before_question) if marker.start() <= role_at
    ]
    if not starts:
        return header
    user_header = before_question[starts[-1] :]
    pattern = "".join(
        r"\w+" if _USER_WORD.fullmatch(piece) else re.escape(piece)
        for piece in _WORDS.split(user_header)
    )
    matches = list(re.finditer(pattern, header))
    return header[: matches[-1].end()] if matches else header


# ---- turns after a tool's result ----------------------------------------------------------------


def headers_after_results(frame: TurnFrame) -> tuple[str, ...]:
    """Return a tuple of the header if the model itself writes the header after a tool's result.

    In that case, rendered answers contain the header after a tool's result, but the generation
    prompt does not. Otherwise the tuple is empty.
    """
    header = frame.header.strip()
    prompt = frame.prober.render(_PROMPT_AFTER_RESULT)
    if not markers(header) or prompt is None or RESULT_TEXT not in prompt:
        return ()
    if header in text_after_last(prompt, RESULT_TEXT):
        return ()
    for answer in (AssistantMessage(CONTENT_TEXT), AssistantMessage(calls=ONE_CALL)):
        text = frame.prober.render(Conversation(answer, tools=True, after_tool_result=True))
        if text is not None and header in text_after_last(text, RESULT_TEXT):
            return (header,)
    return ()


def turn_markers(frame: TurnFrame, reasoning_markers: Sequence[str] = ()) -> tuple[str, ...]:
    r"""Return the texts that can open the model's turn. Every prompt contains one of these texts.

    The first text is the header. Some templates write another marker instead of the header after a
    tool's result. That marker is the second text. The result is empty if the header has no marker,
    or if no text opens the turn after a tool's result.

    Example: the prompts "<|im_start|>assistant\n" and, after a result, "</result><|answer|>" give
    ("<|im_start|>assistant", "<|answer|>").

    Args:
        frame: The frame of the model's turn.
        reasoning_markers: The markers of reasoning. At the end of a prompt, these markers belong to
            the answer.
    """
    header = _strip_prefixes(frame.header.strip(), frame.end_markers)
    if not markers(header):
        return ()
    prompt = frame.prober.render(_PROMPT_AFTER_RESULT)
    if prompt is None or RESULT_TEXT not in prompt:
        return (header,)
    after_result = text_after_last(prompt, RESULT_TEXT)
    if header in after_result:
        return (header,)
    after_result = _strip_suffixes(after_result, reasoning_markers)
    result_markers = markers(after_result)
    if not result_markers or not after_result.rstrip().endswith(result_markers[-1]):
        return ()
    return (header, result_markers[-1])
