r"""Find the header of the model's messages by comparing two renderings.

Example: the generation prompt `<|im_start|>assistant\n<think>\n` consists of two parts. Every
assistant message has the header `<|im_start|>assistant\n`. The rest, `<think>\n`, belongs to the
model's answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    EOS_TOKEN,
    ONE_CALL,
    USER_TEXT,
    AssistantMessage,
    Conversation,
    Switches,
    conversation_with_calls,
)
from nereid_parsers.template.difference import (
    MARKER,
    closing_spellings,
    common_prefix,
    text_after_last,
    tokens,
    trailing_marker,
)
from nereid_parsers.template.model_turn import GenerationPrompt, ModelTurn, prompt_after_header
from nereid_parsers.template.probe import Prober

_USER_WORD = re.compile(r"\w*user\w*", re.IGNORECASE)
_WORDS = re.compile(r"(\w+)")
_MAX_USER_HEADER = 80  # the largest length of a header, in characters

_QUESTION = Conversation()
_PROMPT = Conversation(generation_prompt=True)
# Conversations with an answer. Each rendering contains the header of the model's turn.
_ANSWERED = (
    Conversation(AssistantMessage(CONTENT_TEXT)),
    Conversation(AssistantMessage(CONTENT_TEXT), user_replies=True),
    conversation_with_calls(*ONE_CALL),
)


def compare_generation_prompt(prober: Prober) -> ModelTurn:
    r"""Find the header of the model's turn, which is the text that opens an assistant message.

    Later comparisons need the header to find the model's answer in a rendered conversation.

    Example: the generation prompt adds "<|im_start|>assistant\n<think>\n" to a conversation, but
    messages without reasoning contain only "<|im_start|>assistant\n". So the header is
    "<|im_start|>assistant\n".

    Args:
        prober: Renders the conversations, and records the comparison with the label G for the
            report.

    Returns:
        The header, the generation prompts, and the text after the user's message.
    """
    rendered_prompts = _rendered_prompts(prober)
    header = _find_header(prober, [prompt.text for prompt in rendered_prompts])
    prompts = tuple(
        GenerationPrompt(prompt.switches, prompt.text, prompt_after_header(prompt.text, header))
        for prompt in rendered_prompts
    )
    prober.record(
        "G generation prompt",
        "add_generation_prompt is true.",
        left=_QUESTION,
        right=_PROMPT,
        finding=_describe_header(header, prompts),
    )
    trailing_text = text_after_last(prober.render(_QUESTION) or "", USER_TEXT)
    return ModelTurn(prober, header, prompts, trailing_text=trailing_text)


def _describe_header(header: str, prompts: Sequence[GenerationPrompt]) -> str:
    """Describe the header and the rest of the generation prompt in sentences for the report.

    Example: "The turn opens with '<|assistant|>'. The prompt continues with '<think>'."
    """
    finding = f"The turn opens with {header!r}."
    text_after_header = prompts[0].after_header if prompts else ""
    if text_after_header:
        finding += f" The prompt continues with {text_after_header!r}."
    return finding


class _RenderedPrompt(NamedTuple):
    """A question with the generation prompt.

    Attributes:
        switches: The combination of thinking switches with which the question was rendered.
        text: The whole rendered text.
    """

    switches: Switches
    text: str


def _rendered_prompts(prober: Prober) -> list[_RenderedPrompt]:
    """Render a question with the generation prompt, once for each combination of thinking switches.

    A thinking switch is a template variable such as `enable_thinking`. The generation prompt is the
    text at the end of a prompt that opens the model's answer. A combination with which the template
    raises an error is omitted.
    """
    prompts = []
    for switches in prober.thinking_switches():
        text = prober.render(Conversation(generation_prompt=True, switches=switches))
        if text is not None:
            prompts.append(_RenderedPrompt(switches, text))
    return prompts


def _find_header(prober: Prober, prompts: Sequence[str]) -> str:
    r"""Return the header of the model's turn, which is the text that opens an assistant message.

    The first candidate is the text that the generation prompt adds. Each step then removes a part
    that does not belong to the header:

        text that the generation prompt adds            "<|start|>assistant\n<think></think>\n\n"
        the part that all answers and prompts contain   "<|start|>assistant\n<think></think>\n"
        without an empty block of reasoning             "<|start|>assistant\n"
        without an opening marker of reasoning          "<|start|>assistant\n"
        without text after the role                     "<|start|>assistant\n"

    Args:
        prober: Renders the conversations.
        prompts: The prompt for each setting of the switches.
    """
    question = prober.render(_QUESTION) or ""
    question_and_prompt = prober.render(_PROMPT) or question
    answers = _rendered_answers(prober)
    added = _text_added_by_prompt(question, question_and_prompt)
    if added.strip():
        prompt_ends = [text_after_last(prompt, USER_TEXT) for prompt in prompts]
        shared = _part_in_renderings(added, [*answers, *prompt_ends])
    else:
        # The template ignores add_generation_prompt, so only the answers contain a header.
        shared = _prefix_of_all(text_after_last(question_and_prompt, USER_TEXT), answers)
    return _drop_text_after_header(shared, answers, _user_header(question))


def _drop_text_after_header(shared: str, answers: Sequence[str], user_header: str) -> str:
    """Remove what follows the header in `shared`: a block, a marker, or text after the role.

    >>> _drop_text_after_header("<|assistant|><think></think>", [], user_header="<|user|>")
    '<|assistant|>'

    Args:
        shared: The text with which all answers and prompts start. It starts with the header.
        answers: The rendered answers, each with the header.
        user_header: The text that opens a user's message, or "".
    """
    without_block = _drop_empty_block(shared)
    without_marker = _drop_opening_marker(without_block, answers)
    return _drop_text_after_role(without_marker, user_header)


def _text_added_by_prompt(without_prompt: str, with_prompt: str) -> str:
    r"""Return the text that the generation prompt adds after the user's question.

    Only the text after the question is compared, because some templates also change the system
    message if they render the generation prompt.

    >>> _text_added_by_prompt(f"{USER_TEXT}<|end|>", f"{USER_TEXT}<|end|><|start|>assistant")
    '<|start|>assistant'
    """
    end_without_prompt = text_after_last(without_prompt, USER_TEXT)
    end_with_prompt = text_after_last(with_prompt, USER_TEXT)
    return end_with_prompt.removeprefix(common_prefix(end_without_prompt, end_with_prompt))


def _rendered_answers(prober: Prober) -> list[str]:
    """Render the conversations in `_ANSWERED`, and return the texts after the user's question."""
    answers = []
    for conversation in _ANSWERED:
        text = prober.render(conversation)
        if text is not None and USER_TEXT in text:
            answers.append(text_after_last(text, USER_TEXT).replace(EOS_TOKEN, ""))
    return answers


def _part_in_renderings(added: str, renderings: Sequence[str]) -> str:
    r"""Return the longest prefix of `added` that all other renderings contain.

    The generation prompt is the text that opens the model's answer. Its start is the header if the
    other renderings also contain this start.

    >>> _part_in_renderings("<|a|>\n<think>\n", ["<|a|>\nHello", "<|a|>\n<think>\n"])
    '<|a|>\n'

    Args:
        added: The text that the generation prompt adds to a rendering.
        renderings: Other renderings of the model's turn. A rendering that contains no start of
            `added` is ignored. If all renderings are ignored, the result is `added`.
    """
    prefixes = [_longest_shared_prefix(added, rendering) for rendering in renderings]
    found_prefixes = [prefix for prefix in prefixes if prefix]
    # All these prefixes start at the beginning of `added`, so each of them starts with the shortest
    # prefix. Therefore, every rendering that is not ignored contains the shortest prefix.
    return min(found_prefixes, key=len, default=added)


def _longest_shared_prefix(added: str, rendering: str) -> str:
    r"""Return the longest prefix of `added` that occurs anywhere in `rendering`.

    The prefix ends between two tokens (markers, words or single characters). White space alone does
    not count as a prefix. The result is "" if no prefix occurs.

    >>> _longest_shared_prefix("<|assistant|>\n<think>\n", "\n<|assistant|>\nHello")
    '<|assistant|>\n'
    """
    added_tokens = tokens(added)
    for num_tokens in range(len(added_tokens), 0, -1):  # The longest prefix comes first.
        prefix = "".join(added_tokens[:num_tokens])
        if prefix.strip() and prefix in rendering:
            return prefix
    return ""


def _prefix_of_all(text: str, renderings: Sequence[str]) -> str:
    """Return the longest prefix of `text` that is also a prefix of every rendering.

    The result is "" if there are no renderings.

    >>> _prefix_of_all("<|a|><think>", ["<|a|><think>Hello", "<|a|>Hello"])
    '<|a|>'
    """
    prefixes = [common_prefix(text, rendering) for rendering in renderings]
    return min(prefixes, key=len, default="")


def _drop_empty_block(header: str) -> str:
    """Remove an empty block of reasoning, such as `<think></think>`, from the end of `header`.

    The header is the text that opens the model's turn. It was found by comparing answers. If a
    template writes an empty block before every answer, `header` also contains this block, although
    the block belongs to the answer.

    >>> _drop_empty_block("<|assistant|><think></think>")
    '<|assistant|>'
    """
    header_markers = list(MARKER.finditer(header))
    if len(header_markers) < 2:  # A block consists of two markers.
        return header
    opening, closing = header_markers[-2:]
    is_pair = closing.group() in closing_spellings(opening.group())
    text_inside = header[opening.end() : closing.start()]
    text_after = header[closing.end() :]
    is_other_text_blank = not (text_inside + text_after).strip()
    return header[: opening.start()] if is_pair and is_other_text_blank else header


def _drop_opening_marker(header: str, answers: Sequence[str]) -> str:
    """Remove the opening marker of reasoning, such as `<think>`, from the end of `header`.

    The header is the text that opens the model's turn. It was found by comparing answers. If every
    answer contains the marker, `header` also contains the marker, although the marker belongs to
    the answer. The marker is removed if its closing marker directly follows the header in an
    answer with content, because the two markers then enclose empty reasoning.

    >>> answer = f"<|assistant|><think></think>{CONTENT_TEXT}"
    >>> _drop_opening_marker("<|assistant|><think>", [answer])
    '<|assistant|>'

    Args:
        header: The header.
        answers: The rendered answers, each with the header.
    """
    opening = trailing_marker(header)
    if not opening:
        return header
    answers_with_content = [answer for answer in answers if CONTENT_TEXT in answer]
    is_closed_at_once = any(
        _is_closed_after_header(answer, header, opening) for answer in answers_with_content
    )
    return header[: header.rfind(opening)] if is_closed_at_once else header


def _is_closed_after_header(answer: str, header: str, opening: str) -> bool:
    """Return whether the closing marker of `opening` directly follows the header in an answer.

    >>> _is_closed_after_header("<|assistant|><think></think>Hi", "<|assistant|><think>", "<think>")
    True
    """
    _, _, after_header = answer.partition(header.strip())
    possible_closings = tuple(closing_spellings(opening))
    return after_header.lstrip().startswith(possible_closings)


def _user_header(question: str) -> str:
    r"""Return the text that opens the user's message, or "" if this text is not found.

    The result is the text from the last marker before the role "user" to the user's question.

    >>> _user_header(f"<|bos|><|start|>user\n{USER_TEXT}<|end|>")
    '<|start|>user\n'

    Args:
        question: The user's question, rendered without the generation prompt.
    """
    before_question, _, _ = question.rpartition(USER_TEXT)
    # A long text before the question may start with a system message, so only its end is searched.
    end_of_text = before_question[-_MAX_USER_HEADER:]
    role_starts = [role.start() for role in _USER_WORD.finditer(end_of_text)]
    if not role_starts:
        return ""
    # A marker may also contain the role, as in `<|user|>`. This marker starts before the role.
    marker_starts = [marker.start() for marker in MARKER.finditer(end_of_text)]
    starts_before_role = [start for start in marker_starts if start <= role_starts[-1]]
    return end_of_text[starts_before_role[-1] :] if starts_before_role else ""


def _drop_text_after_role(header: str, user_header: str) -> str:
    r"""Shorten `header` to the part that corresponds to the header of a user message.

    A header is the text that opens a message. The two headers are equal, except for the role
    ("user" or "assistant"). If every prompt and every answer continues with `<think>`, this marker
    seems to belong to the model's header. The user's header shows where the model's header really
    ends.

    >>> _drop_text_after_role("<|start|>assistant\n<think>\n", "<|start|>user\n")
    '<|start|>assistant\n'
    """
    if not user_header:
        return header
    regex = _regex_for_any_role(user_header)  # `<|start|>\w+\n` for the header `<|start|>user\n`
    matches = list(re.finditer(regex, header))
    if not matches:
        return header
    # Earlier matches may be headers of other messages. The last match is the model's header.
    return header[: matches[-1].end()]


def _regex_for_any_role(user_header: str) -> str:
    r"""Return a regex that matches a message header like `user_header`, but accepts any role.

    >>> _regex_for_any_role("<|start|>user:")
    '<\\|start\\|>\\w+:'
    """
    # The capturing group of `_WORDS` keeps the words in the result of `split`.
    pieces = _WORDS.split(user_header)
    regexes = [r"\w+" if _USER_WORD.fullmatch(piece) else re.escape(piece) for piece in pieces]
    return "".join(regexes)
