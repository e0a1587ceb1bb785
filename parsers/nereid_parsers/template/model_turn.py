r"""The text around the model's answer in a rendered conversation.

Example: in the rendering below, the header of the model's turn is `<|im_start|>assistant\n`, and
the marker `<|im_end|>` ends the turn. A model would generate the text between the header and the
last marker.

    <|im_start|>user
    Quokka asks for something.<|im_end|>
    <|im_start|>assistant
    Wombat gives the answer.<|im_end|>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    EOS_TOKEN,
    ONE_CALL,
    RESULT_TEXT,
    USER_TEXT,
    AssistantMessage,
    Conversation,
    InputForm,
    Switches,
)
from nereid_parsers.template.difference import (
    common_prefix,
    drop_common_suffix,
    markers,
    text_after_last,
    trailing_marker,
)
from nereid_parsers.template.probe import Prober

_PROMPT_AFTER_RESULT = Conversation(generation_prompt=True, tools=True, after_tool_result=True)
_ANSWERED_AFTER_RESULT = (
    Conversation(AssistantMessage(CONTENT_TEXT), tools=True, after_tool_result=True),
    Conversation(AssistantMessage(calls=ONE_CALL), tools=True, after_tool_result=True),
)


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    r"""A rendered conversation that ends with the generation prompt.

    Attributes:
        switches: The switches with which the prompt was rendered.
        text: The whole prompt.
        after_header: The text after the header of the model's turn, such as `"<think>\n"`. Often
            this text is "".
    """

    switches: Switches
    text: str
    after_header: str

    @property
    def conversation(self) -> Conversation:
        """The conversation that was rendered as this prompt."""
        return Conversation(generation_prompt=True, switches=self.switches)


@dataclass(frozen=True, slots=True)
class ModelTurn:
    r"""The markup around the model's answer, in all renderings of one template.

    Attributes:
        prober: Renders the conversations.
        header: The text that opens the model's turn: `"<|im_start|>assistant\n"`.
        prompts: The generation prompts, one for each setting of the thinking switches. Settings
            that the template fails to render are omitted. The first prompt is the default.
        end_markers: The markers that end a turn: `("<|im_end|>",)`. Empty until `compare_content`
            has found the markers.
        trailing_text: The text after the user's question, if no answer follows: `"<|im_end|>\n"`.
    """

    prober: Prober
    header: str = ""
    prompts: tuple[GenerationPrompt, ...] = ()
    end_markers: tuple[str, ...] = ()
    trailing_text: str = ""

    def text_after_header(
        self, conversation: Conversation, form: InputForm | None = None
    ) -> str | None:
        r"""Render a conversation, and return the text after the header of the model's answer.

        The header is the text that opens an answer. Example: the rendering
        "... <|im_start|>assistant\nHello<|im_end|>\n" has the header "<|im_start|>assistant\n" and
        gives "Hello<|im_end|>\n".

        Args:
            conversation: The conversation.
            form: The form of the messages, see `Prober.render`.

        Returns:
            The text, or None if the template fails to render the conversation.
        """
        rendering = self.prober.render(conversation, form)
        if rendering is None:
            return None
        after_input = _text_after_input(rendering, conversation)
        header = _header_in(after_input, self.header)
        if header:
            _, _, after_header = after_input.partition(header)
            return after_header
        # Without a header, the answer starts after the markup that ends the user's message.
        end_of_user_message = common_prefix(after_input, self.trailing_text)
        return after_input.removeprefix(end_of_user_message)

    def generated_text(self, conversation: Conversation) -> str | None:
        r"""Return the part of the rendered `conversation` that a model would generate.

        This is the text after the header, without the markers that end the turn. Example: the
        rendering "... <|im_start|>assistant\nHello<|im_end|>\n" gives "Hello".
        """
        text = self.text_after_header(conversation)
        if text is None:
            return None
        return self.without_end_markers(drop_common_suffix(text, self.trailing_text))

    def without_end_markers(self, text: str) -> str:
        r"""Remove the end-of-turn markers from the end of `text`.

        Example: if `<|im_end|>` ends a turn, "Hello<|im_end|>\n" gives "Hello".
        """
        return _strip_suffixes(text, (*self.end_markers, EOS_TOKEN))


def prompt_after_header(prompt: str, header: str) -> str:
    r"""Return the text that follows the header of the model's turn in a prompt.

    Return "" if the prompt does not contain the header. Example: the prompt
    "... <|im_start|>assistant\n<think>\n" gives "<think>\n".
    """
    after_question = text_after_last(prompt, USER_TEXT)
    header_in_prompt = _header_in(after_question, header)
    return text_after_last(after_question, header_in_prompt) if header_in_prompt else ""


def _text_after_input(rendering: str, conversation: Conversation) -> str:
    """Return the rendered text after the last input that the model answers.

    The input is the tool's result, or else the user's question. Example: the rendering
    "<user>QUESTION</user><assistant>Hello" gives "</user><assistant>Hello".
    """
    follows_tool_result = conversation.after_tool_result and RESULT_TEXT in rendering
    return text_after_last(rendering, RESULT_TEXT if follows_tool_result else USER_TEXT)


def _header_in(text: str, header: str) -> str:
    r"""Return `header` as it occurs in `text`: unchanged, or without outer white space.

    Some templates remove the white space around a header in some messages. Return "" if `text` does
    not contain the header.

    >>> _header_in("<|im_start|>assistant <think>", "<|im_start|>assistant\n")
    '<|im_start|>assistant'
    """
    if header in text:
        return header
    stripped = header.strip()
    return stripped if stripped in text else ""


def _strip_suffixes(text: str, suffixes: Sequence[str]) -> str:
    r"""Remove the suffixes from the end of `text`. White space after a suffix is also removed.

    >>> _strip_suffixes("Hello\n<e1>\n<e2>\n", ("<e1>", "<e2>"))
    'Hello\n'
    """
    while True:  # Each pass removes one suffix.
        stripped = text.rstrip()
        found_suffixes = [suffix for suffix in suffixes if suffix and stripped.endswith(suffix)]
        if not found_suffixes:
            return text
        text = stripped.removesuffix(found_suffixes[0])


def _strip_prefixes(text: str, prefixes: Sequence[str]) -> str:
    r"""Remove the prefixes from the start of `text`. White space after a prefix is also removed.

    >>> _strip_prefixes("<end>\n<start>assistant", ("<end>",))
    '<start>assistant'
    """
    while True:  # Each pass removes one prefix.
        found_prefixes = [prefix for prefix in prefixes if prefix and text.startswith(prefix)]
        if not found_prefixes:
            return text
        text = text.removeprefix(found_prefixes[0]).lstrip()


# ---- turns after a tool's result ----------------------------------------------------------------


def header_after_result(turn: ModelTurn) -> str:
    """Return the header that the model itself writes between a tool's result and the answer.

    Usually the prompt ends with the header, such as `<|assistant|>`, so that the model does not
    write the header. Some templates omit the header from a prompt that ends with a tool's result,
    but render the header in the answer. The model then writes the header, and the parser must
    remove the header from the output.

    Example: the prompt ends with "RESULT</result>", and the rendered answer is
    "RESULT</result><|assistant|>CONTENT". The result is `<|assistant|>`.

    Args:
        turn: The header of the model's turn, and the prober that renders the conversations.

    Returns:
        The header, or "" if the model does not write the header.
    """
    header = turn.header.strip()
    if not markers(header):
        return ""  # A header without a marker cannot be distinguished from other text.
    prompt_end = _prompt_end_after_result(turn.prober)
    if prompt_end is None or header in prompt_end:
        return ""  # The template renders no result, or the header is a part of the prompt.
    return header if _has_header_after_result(turn.prober, header) else ""


def _has_header_after_result(prober: Prober, header: str) -> bool:
    """Return whether a rendered answer contains `header` after a tool's result.

    Two answers are tried: content and a tool call.
    """
    renderings = (prober.render(conversation) or "" for conversation in _ANSWERED_AFTER_RESULT)
    return any(header in text_after_last(text, RESULT_TEXT) for text in renderings)


def turn_markers(turn: ModelTurn, reasoning_markers: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the texts that can open the model's turn at the end of a prompt.

    The parser searches a prompt for these texts, to find the start of the model's turn. After a
    question, the header opens the turn, such as `<|assistant|>`. After a tool's result, a prompt
    ends in one of three ways:

        End of the prompt            Result
        `</result><|assistant|>`     the header: ("<|assistant|>",)
        `</result><|answer|>`        the header and this marker: ("<|assistant|>", "<|answer|>")
        `</result>`                  (), because no text opens the turn

    In the third case, the parser would find the header of an earlier turn if the result contained
    the header.

    Args:
        turn: The header and the end markers of the model's turn, and the prober that renders the
            conversations.
        reasoning_markers: The markers of reasoning. At the end of a prompt, these markers belong to
            the answer.

    Returns:
        The texts. The tuple is also empty if the header contains no marker.
    """
    header = _strip_prefixes(turn.header.strip(), turn.end_markers)
    if not markers(header):
        return ()
    prompt_end = _prompt_end_after_result(turn.prober)
    # If the template renders no results, the header opens every turn.
    if prompt_end is None or header in prompt_end:
        return (header,)
    other_marker = _marker_after_result(prompt_end, reasoning_markers)
    return (header, other_marker) if other_marker else ()


def _marker_after_result(after_result: str, reasoning_markers: Sequence[str]) -> str:
    """Return the marker that opens the model's turn after a tool's result, or "".

    >>> _marker_after_result("</result><|answer|><think>", ["<think>"])
    '<|answer|>'

    Args:
        after_result: The text after the result in a prompt.
        reasoning_markers: The markers of reasoning.
    """
    return trailing_marker(_strip_suffixes(after_result, reasoning_markers))


def _prompt_end_after_result(prober: Prober) -> str | None:
    """Render a prompt that contains a tool's result, and return the text after this result.

    Return None if the template does not render the result. Example: the prompt
    "...<result>RESULT</result><|assistant|>" gives "</result><|assistant|>".
    """
    prompt = prober.render(_PROMPT_AFTER_RESULT)
    if prompt is None or RESULT_TEXT not in prompt:
        return None
    return text_after_last(prompt, RESULT_TEXT)
