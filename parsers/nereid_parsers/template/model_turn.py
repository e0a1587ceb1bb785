r"""The texts before and after the model's answer in a rendered conversation.

A turn is one message of a conversation. The header is the text that opens a turn. Example: in the
rendering below, the header of the model's turn is `<|im_start|>assistant\n`, and the marker
`<|im_end|>` ends the turn. A model would generate the text between the header and the last marker.

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
from nereid_parsers.template.markup.difference import (
    common_prefix,
    drop_common_suffix,
    text_after_last,
)
from nereid_parsers.template.markup.markers import markers, trailing_marker
from nereid_parsers.template.probe import Prober

_PROMPT_AFTER_RESULT = Conversation(generation_prompt=True, tools=True, after_tool_result=True)
_ANSWERED_AFTER_RESULT = (
    Conversation(AssistantMessage(CONTENT_TEXT), tools=True, after_tool_result=True),
    Conversation(AssistantMessage(calls=ONE_CALL), tools=True, after_tool_result=True),
)


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    r"""A rendered conversation. It ends with the text that opens the model's answer.

    A generation prompt is the text at the end of a prompt that opens the model's answer, such as
    "<|im_start|>assistant\n<think>\n". It starts with the header "<|im_start|>assistant\n", which
    every assistant message has.

    Attributes:
        switches: The setting of the thinking switches with which the prompt was rendered.
        text: The whole prompt.
        after_header: The text after the header, such as "<think>\n". Often this text is "".
    """

    switches: Switches
    text: str
    after_header: str

    @property
    def conversation(self) -> Conversation:
        """The conversation from which this prompt was rendered."""
        return Conversation(generation_prompt=True, switches=self.switches)


@dataclass(frozen=True, slots=True)
class ModelTurn:
    r"""The texts that one chat template writes before and after the model's answer.

    Attributes:
        prober: Renders conversations with the template.
        header: The text that opens an assistant message: "<|im_start|>assistant\n".
        prompts: The rendered prompts, one for each setting of the thinking switches. The first
            prompt is the default. A setting is omitted if the template fails to render the prompt.
        end_markers: The markers that end a message: ("<|im_end|>",). The tuple is empty until
            `find_content_markers` has found the markers.
        after_user_message: The text after the user's question, if no answer follows. Example:
            "<|im_end|>\n".
    """

    prober: Prober
    header: str = ""
    prompts: tuple[GenerationPrompt, ...] = ()
    end_markers: tuple[str, ...] = ()
    after_user_message: str = ""

    def text_after_header(
        self, conversation: Conversation, form: InputForm | None = None
    ) -> str | None:
        r"""Render a conversation. Return the text after the header that opens the model's answer.

        The header is the text that opens an assistant message. Example: the rendering
        "... <|im_start|>assistant\nHello<|im_end|>\n" has the header "<|im_start|>assistant\n". The
        result is "Hello<|im_end|>\n". If the template writes no header, the result starts after the
        markup that ends the user's message or the tool's result. The result is None if the template
        fails to render the conversation.

        `form` is the form of the messages; None means the form of the prober.
        """
        rendering = self.prober.render(conversation, form)
        if rendering is None:
            return None
        after_input = text_after_last(rendering, _last_input(conversation, rendering))
        header = _header_as_written(after_input, self.header)
        if not header:
            return self._drop_end_of_input(after_input)
        _, _, after_header = after_input.partition(header)
        return after_header

    def _drop_end_of_input(self, after_input: str) -> str:
        """Remove the markup that ends the input, such as `<|end|>`, from the start of a text.

        `after_input` is the text after the input, a user's message or a tool's result, in a
        rendering. Only the markup that ends a user's message is known. If the markup after a tool's
        result differs, only the start that both have in common is removed.
        """
        return after_input.removeprefix(common_prefix(after_input, self.after_user_message))

    def generated_text(self, conversation: Conversation) -> str | None:
        r"""Render a conversation, and return the part that a model would generate.

        The model generates the text between the header, which opens the assistant message, and the
        marker that ends the message. Example: the rendering
        "... <|im_start|>assistant\nHello<|im_end|>\n" gives "Hello". Return None if the template
        fails to render the conversation.
        """
        text = self.text_after_header(conversation)
        return None if text is None else self.drop_end_of_message(text)

    def drop_end_of_message(self, text: str) -> str:
        r"""Remove the markup that ends a message, such as `<|im_end|>`, from the end of `text`.

        `text` is a rendered answer. White space after the markup is also removed.

        Example: if `<|im_end|>` ends a message, "Hello<|im_end|>\n" gives "Hello".
        """
        # Most templates write the same markup, for example "<|end|>\n", after an answer and after a
        # user's message. The whole markup is removed first, because an end marker is removed only
        # if no other markup follows.
        without_common_end = drop_common_suffix(text, self.after_user_message)
        return _strip_suffixes(without_common_end, (*self.end_markers, EOS_TOKEN))


def _last_input(conversation: Conversation, rendering: str) -> str:
    """Return the last text before the model's answer: the tool's result or the user's question.

    Some templates do not render the tool's result. In their renderings, the user's question is the
    last text before the answer.
    """
    is_result_rendered = conversation.after_tool_result and RESULT_TEXT in rendering
    return RESULT_TEXT if is_result_rendered else USER_TEXT


def prompt_after_header(prompt: str, header: str) -> str:
    r"""Return the text that follows the last `header` in a prompt.

    The header opens the model's answer. Example: if the header is "<|im_start|>assistant\n", the
    prompt "... <|im_start|>assistant\n<think>\n" gives "<think>\n". Return "" if the header does
    not occur after the user's question.
    """
    after_question = text_after_last(prompt, USER_TEXT)
    header_in_prompt = _header_as_written(after_question, header)
    return text_after_last(after_question, header_in_prompt) if header_in_prompt else ""


def _header_as_written(text: str, header: str) -> str:
    r"""Return the form of `header` that occurs in `text`: unchanged or without outer white space.

    A header is the text that opens a message. Some templates write other white space around the
    header in some messages. In this example, a space replaces the line break:

    >>> _header_as_written("<|im_start|>assistant <think>", header="<|im_start|>assistant\n")
    '<|im_start|>assistant'

    Return "" if `text` contains the header in neither form, or if `header` is "".
    """
    if header in text:
        return header
    stripped = header.strip()
    return stripped if stripped in text else ""


def _strip_suffixes(text: str, suffixes: Sequence[str]) -> str:
    r"""Remove all suffixes, and the white space after each suffix, from the end of `text`.

    The suffixes may occur in any order, and several times.

    >>> _strip_suffixes("Hello\n<e1>\n<e2>\n", ("<e1>", "<e2>"))
    'Hello\n'
    """
    rest = text
    while True:  # Each pass removes one suffix.
        stripped = rest.rstrip()
        found_suffixes = [suffix for suffix in suffixes if suffix and stripped.endswith(suffix)]
        if not found_suffixes:
            return rest
        rest = stripped.removesuffix(found_suffixes[0])


def _strip_prefixes(text: str, prefixes: Sequence[str]) -> str:
    r"""While `text` starts with one of the prefixes, remove the prefix and white space after it.

    The prefixes may occur in any order, and several times.

    >>> _strip_prefixes("<end>\n<start>assistant", ("<end>",))
    '<start>assistant'
    """
    rest = text
    while True:  # Each pass removes one prefix.
        found_prefixes = [prefix for prefix in prefixes if prefix and rest.startswith(prefix)]
        if not found_prefixes:
            return rest
        rest = rest.removeprefix(found_prefixes[0]).lstrip()


def header_after_result(turn: ModelTurn) -> str:
    """Return the header that the model must write after a tool's result, or "" if there is none.

    A header is the text that opens an assistant message, such as `<|assistant|>`. Usually the
    prompt ends with the header, so the model starts directly with the answer. In some templates, a
    prompt with a tool's result lacks the header, but the rendered answer to the result has it:

        end of the prompt                 RESULT</result>
        end of a rendered conversation    RESULT</result><|assistant|>CONTENT

    The model then writes the header `<|assistant|>` itself, and the parser must remove the header
    from the output. In all other cases, the result is "".
    """
    header = turn.header.strip()
    if not markers(header):
        return ""  # A header without a marker cannot be distinguished from other text.
    prompt_end = _prompt_end_after_result(turn.prober)
    if prompt_end is None:
        return ""  # The template does not render a tool's result.
    if header in prompt_end:
        return ""  # The model does not write the header, because the prompt contains the header.
    return header if _is_written_after_result(header, turn.prober) else ""


def _is_written_after_result(header: str, prober: Prober) -> bool:
    """Return whether the template writes `header` between a tool's result and the answer.

    The answer is content or another tool call. A header before one kind of answer is sufficient.
    """
    renderings = (prober.render(conversation) or "" for conversation in _ANSWERED_AFTER_RESULT)
    return any(header in text_after_last(text, RESULT_TEXT) for text in renderings)


def turn_markers(turn: ModelTurn, reasoning_markers: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the texts that can open the model's answer at the end of a prompt.

    The parser searches a prompt for these texts, because the text after them is the start of the
    answer. After a question, the header opens the answer. After a tool's result, another text may
    open the answer. Examples for the header `<|assistant|>`:

        end of a prompt with a result   returned texts
        </result><|assistant|>          ("<|assistant|>",)
        </result><|answer|>             ("<|assistant|>", "<|answer|>")
        </result>                       ()

    The result is () if the parser cannot find the start of the answer in this way.
    `reasoning_markers` at the end of a prompt are ignored, because they belong to the answer.
    """
    # `turn.header` may start with the markers that end a user's message. These markers are removed,
    # because a tool's result may end with different markers.
    header = _strip_prefixes(turn.header.strip(), turn.end_markers)
    if not markers(header):
        return ()  # A header without a marker cannot be distinguished from other text.
    prompt_end = _prompt_end_after_result(turn.prober)
    if prompt_end is None:
        return (header,)  # The template does not render a tool's result.
    if header in prompt_end:
        return (header,)  # The header also opens the answer after a tool's result.
    other_marker = trailing_marker(_strip_suffixes(prompt_end, reasoning_markers))
    if not other_marker:
        # No text opens the answer, so the parser would find the header of an earlier message.
        return ()
    return (header, other_marker)


def _prompt_end_after_result(prober: Prober) -> str | None:
    """Render a prompt with a tool's result. Return the text after the result.

    Example: the prompt "...<result>RESULT</result><|assistant|>" gives "</result><|assistant|>".
    Return None if the rendered prompt does not contain the result.
    """
    prompt = prober.render(_PROMPT_AFTER_RESULT)
    if prompt is None or RESULT_TEXT not in prompt:
        return None
    return text_after_last(prompt, RESULT_TEXT)
