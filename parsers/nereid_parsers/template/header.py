r"""Find the header of assistant messages, such as `<|im_start|>assistant`.

The header is the text that opens every assistant message. The generation prompt is the text at the
end of a prompt that opens the model's answer. Example: the generation prompt
`<|im_start|>assistant\n<think>\n` consists of the header, `<|im_start|>assistant\n`, and of
`<think>\n`, which belongs to the model's answer.
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
from nereid_parsers.template.thinking_switches import thinking_switches

_USER_WORD = re.compile(r"\w*user\w*", re.IGNORECASE)
_WORDS = re.compile(r"(\w+)")
_MAX_USER_HEADER = 80  # the maximum length of the header of a user message, in characters

_QUESTION = Conversation()
_PROMPT = Conversation(generation_prompt=True)
# Each of these conversations contains an assistant message, so its rendering contains the header of
# an assistant message, such as `<|assistant|>`.
_ANSWERED = (
    Conversation(AssistantMessage(CONTENT_TEXT)),
    Conversation(AssistantMessage(CONTENT_TEXT), user_replies=True),
    conversation_with_calls(*ONE_CALL),
)


def find_model_turn(prober: Prober) -> ModelTurn:
    r"""Find the texts around the model's answers, such as the header of an assistant message.

    The header is the text that opens every assistant message. Later comparisons need the header to
    find the model's answer in a rendered conversation. Example: the generation prompt, which opens
    the answer at the end of a prompt, is "<|im_start|>assistant\n<think>\n". Rendered messages
    without reasoning contain only the part "<|im_start|>assistant\n", so this part is the header.

    Args:
        prober: Renders conversations with the template.

    Mutates: `prober`, which records the comparison for the report, with the label G.

    Returns:
        The header, the rendered prompts, and the text after the user's question.
    """
    # For each setting of the thinking switches, such as `enable_thinking=False`, this list contains
    # one rendered prompt.
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
    after_user_message = text_after_last(prober.render(_QUESTION) or "", USER_TEXT)
    return ModelTurn(prober, header, prompts, after_user_message=after_user_message)


def _describe_header(header: str, prompts: Sequence[GenerationPrompt]) -> str:
    """Describe the header of assistant messages, such as `<|assistant|>`, for the report.

    Example: "The turn opens with '<|assistant|>'. The prompt continues with '<think>'."

    Args:
        header: The text that opens an assistant message.
        prompts: The rendered prompts. The text after the header is taken from the first prompt.
    """
    finding = f"The turn opens with {header!r}."
    text_after_header = prompts[0].after_header if prompts else ""
    if text_after_header:
        finding += f" The prompt continues with {text_after_header!r}."
    return finding


class _RenderedPrompt(NamedTuple):
    """A rendered question. The text ends with a generation prompt, such as `<|assistant|>`.

    Attributes:
        switches: The setting of the thinking switches, such as enable_thinking=False.
        text: The whole rendered text.
    """

    switches: Switches
    text: str


def _rendered_prompts(prober: Prober) -> list[_RenderedPrompt]:
    """For each thinking setting, such as `enable_thinking=False`, render a question as a prompt.

    A thinking switch is a template variable such as `enable_thinking`. The generation prompt is the
    text at the end of a prompt that opens the model's answer. A setting is omitted if the template
    fails to render the question with this setting.
    """
    prompts = []
    for switches in thinking_switches(prober.template, fixed_variables=prober.kwargs):
        text = prober.render(Conversation(generation_prompt=True, switches=switches))
        if text is not None:
            prompts.append(_RenderedPrompt(switches, text))
    return prompts


def _find_header(prober: Prober, prompts: Sequence[str]) -> str:
    r"""Return the header, which is the text that opens every assistant message.

    The search starts with the generation prompt, the text that opens the model's answer at the end
    of a prompt. Two steps remove text that does not belong to the header. Example:

        generation prompt                              "<|start|>assistant\n<think></think>\n\n"
        only the part that all renderings contain      "<|start|>assistant\n<think></think>\n"
        without text that belongs to the answer        "<|start|>assistant\n"

    Args:
        prober: Renders conversations with the template.
        prompts: The rendered prompts, one for each setting of the thinking switches.
    """
    question = prober.render(_QUESTION) or ""  # without the generation prompt
    question_and_prompt = prober.render(_PROMPT) or question
    answers = _rendered_answers(prober)
    generation_prompt = _cut_generation_prompt(question, question_and_prompt)
    if generation_prompt.strip():
        prompt_ends = [text_after_last(prompt, USER_TEXT) for prompt in prompts]
        shared_text = _prefix_in_renderings(generation_prompt, [*answers, *prompt_ends])
    else:
        # The template ignores `add_generation_prompt`. It may write the header after every
        # question, as in "QUESTION<|end|><|start|>assistant". If all answers start with the text
        # after the question, this text becomes the header, including `<|end|>`.
        after_question = text_after_last(question_and_prompt, USER_TEXT)
        shared_text = _prefix_of_all(after_question, answers)
    # The headers of user messages and assistant messages have the same form. Therefore, the header
    # of a user message shows where the header of an assistant message ends.
    return _drop_text_after_header(shared_text, answers, user_header=_user_header(question))


def _drop_text_after_header(shared: str, answers: Sequence[str], user_header: str) -> str:
    """Remove the text after the header: `<|assistant|><think>` becomes `<|assistant|>`.

    The header is the text that opens every assistant message. If every rendered answer starts with
    `<think>` or with an empty block of reasoning, `shared` contains this text too:

    >>> _drop_text_after_header("<|assistant|><think></think>", [], user_header="<|user|>")
    '<|assistant|>'

    Args:
        shared: The text that all prompts and answers have in common.
        answers: The rendered answers, each with the header.
        user_header: The text that opens a user message, such as `<|user|>`, or "" if it is not
            known. The header of an assistant message has the same form: text after this form, such
            as `<think>`, belongs to the answer.
    """
    without_block = _drop_empty_block(shared)  # `<think></think>` at the end is removed.
    without_marker = _drop_opening_marker(without_block, answers)  # `<think>` at the end, too.
    return _drop_text_after_role(without_marker, user_header)


def _cut_generation_prompt(without_prompt: str, with_prompt: str) -> str:
    r"""Return the generation prompt, which is the text that opens the model's answer.

    A template writes the generation prompt after the user's question. Only the texts after the
    question are compared, because some templates also change the system message when they write
    the generation prompt.

    >>> _cut_generation_prompt(f"{USER_TEXT}<|end|>", f"{USER_TEXT}<|end|><|start|>assistant")
    '<|start|>assistant'

    Args:
        without_prompt: The question, rendered without the generation prompt.
        with_prompt: The question, rendered with the generation prompt.
    """
    end_without_prompt = text_after_last(without_prompt, USER_TEXT)
    end_with_prompt = text_after_last(with_prompt, USER_TEXT)
    return end_with_prompt.removeprefix(common_prefix(end_without_prompt, end_with_prompt))


def _rendered_answers(prober: Prober) -> list[str]:
    """Render several conversations. From each rendering, return the text after the user's question.

    Example: "...QUESTION<|end|><|assistant|>Hello" gives "<|end|><|assistant|>Hello". Conversations
    that the template fails to render are omitted. EOS_TOKEN, the placeholder for an unknown token
    at the end of an answer, is removed.
    """
    answers = []
    for conversation in _ANSWERED:
        text = prober.render(conversation)
        if text is not None and USER_TEXT in text:
            answers.append(text_after_last(text, USER_TEXT).replace(EOS_TOKEN, ""))
    return answers


def _prefix_in_renderings(generation_prompt: str, renderings: Sequence[str]) -> str:
    r"""Return the longest prefix of `generation_prompt` that all `renderings` contain.

    The generation prompt opens the model's answer at the end of a prompt, and starts with the
    header of an assistant message. Other renderings of assistant messages show where the header
    ends:

    >>> _prefix_in_renderings("<|a|>\n<think>\n", ["<|a|>\nHello", "<|a|>\n<think>\n"])
    '<|a|>\n'

    Args:
        generation_prompt: The generation prompt.
        renderings: Rendered answers and the ends of rendered prompts. A rendering without any
            prefix of the generation prompt contains no header, so it does not show where the header
            ends, and is ignored. If all renderings are ignored, the result is the whole generation
            prompt.
    """
    # In the example, these prefixes are `<|a|>\n` and `<|a|>\n<think>\n`.
    prefixes = [_longest_prefix_in(rendering, generation_prompt) for rendering in renderings]
    found_prefixes = [prefix for prefix in prefixes if prefix]
    # The longer prefixes start with the shortest prefix. Therefore, each rendering that contains a
    # longer prefix also contains the shortest prefix.
    return min(found_prefixes, key=len, default=generation_prompt)


def _longest_prefix_in(rendering: str, generation_prompt: str) -> str:
    r"""Return the longest prefix of `generation_prompt` that occurs anywhere in `rendering`.

    The prefix consists of whole tokens: markers such as `<think>`, words and single characters. The
    result is "" if no prefix occurs in `rendering`, or only white space.

    >>> _longest_prefix_in("\n<|assistant|>\nHello", "<|assistant|>\n<think>\n")
    '<|assistant|>\n'
    """
    prompt_tokens = tokens(generation_prompt)
    for num_tokens in range(len(prompt_tokens), 0, -1):  # Longer prefixes are tried first.
        prefix = "".join(prompt_tokens[:num_tokens])
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

    The header is the text that opens every assistant message. If a template writes an empty block
    before every answer, the search for the header has included the block. The block belongs to the
    answer, so this function removes the block.

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
    is_empty_block_at_end = is_pair and not text_inside.strip() and not text_after.strip()
    return header[: opening.start()] if is_empty_block_at_end else header


def _drop_opening_marker(header: str, answers: Sequence[str]) -> str:
    """Remove the opening marker of reasoning, such as `<think>`, from the end of `header`.

    The header is the text that opens every assistant message. If every answer starts with
    `<think>`, the search for the header has included `<think>`. An answer that continues with
    `</think>` shows that the last marker of the header opens reasoning:

    >>> answer = f"<|assistant|><think></think>{CONTENT_TEXT}"
    >>> _drop_opening_marker("<|assistant|><think>", [answer])
    '<|assistant|>'

    Args:
        header: The header that the search has found. It is returned unchanged if its last marker
            does not open reasoning.
        answers: The rendered answers, each with the header. Only answers with content are used,
            because in other answers, the marker after the header may belong to a tool call.
    """
    opening = trailing_marker(header)
    if not opening:
        return header
    # If the closing marker directly follows `opening` in an answer, as in `<think></think>`, the
    # marker `opening` opens reasoning.
    opens_reasoning = any(
        _closes_after_header(answer, header, opening)
        for answer in answers
        if CONTENT_TEXT in answer
    )
    before_opening, _, _ = header.rpartition(opening)
    return before_opening if opens_reasoning else header


def _closes_after_header(answer: str, header: str, opening: str) -> bool:
    """Return whether the text after the header starts with a closing marker, such as `</think>`.

    The last marker of the header is `opening`, such as `<think>`. Only a closing marker that
    belongs to `opening`, such as `</think>`, is accepted.

    >>> _closes_after_header("<|assistant|><think></think>Hi", "<|assistant|><think>", "<think>")
    True
    """
    _, _, after_header = answer.partition(header.strip())
    possible_closings = tuple(closing_spellings(opening))
    return after_header.lstrip().startswith(possible_closings)


def _user_header(question: str) -> str:
    r"""Return the text, such as `<|user|>`, that opens the user's message, or "" if none is found.

    The header starts with a marker, such as `<|start|>`, and contains the role "user". It ends at
    the user's question:

    >>> _user_header(f"<|bos|><|start|>user\n{USER_TEXT}<|end|>")
    '<|start|>user\n'

    Args:
        question: The user's question, rendered without the generation prompt.
    """
    before_question, _, _ = question.rpartition(USER_TEXT)
    # Only the last characters before the question are searched, because earlier text may belong to
    # a system message.
    end_of_text = before_question[-_MAX_USER_HEADER:]
    roles = list(_USER_WORD.finditer(end_of_text))
    if not roles:
        return ""
    role_start = roles[-1].start()
    # The user's header starts with the last marker that precedes the role, as in `<|start|>user`,
    # or that contains the role, as in `<|user|>`.
    marker_starts = [marker.start() for marker in MARKER.finditer(end_of_text)]
    starts_before_role = [start for start in marker_starts if start <= role_start]
    return end_of_text[starts_before_role[-1] :] if starts_before_role else ""


def _drop_text_after_role(header: str, user_header: str) -> str:
    r"""Remove text that belongs to the answer, such as `<think>`, from the end of `header`.

    A header is the text that opens a message. If every answer starts with `<think>`, the search for
    the header has included `<think>`. The header of an assistant message has the form of a user's
    header, but contains the role "assistant" instead of "user". Therefore, the user's header shows
    where the header of the assistant message ends:

    >>> _drop_text_after_role("<|start|>assistant\n<think>\n", user_header="<|start|>user\n")
    '<|start|>assistant\n'

    Return `header` unchanged if `user_header` is "", or if the two headers have different forms.
    """
    if not user_header:
        return header
    regex = _regex_for_any_role(user_header)  # `<|start|>\w+\n` for the header `<|start|>user\n`
    matches = list(re.finditer(regex, header))
    if not matches:
        return header
    # The last match is the header of the assistant message. Earlier matches are the headers of
    # earlier messages.
    return header[: matches[-1].end()]


def _regex_for_any_role(user_header: str) -> str:
    r"""Convert the header into a regular expression that accepts any word in place of "user".

    The word "user" is the role in the header of a user message. The expression also matches the
    header of an assistant message, which differs only in the role:

    >>> _regex_for_any_role("<|start|>user:")
    '<\\|start\\|>\\w+:'
    """
    # Because `_WORDS` contains a capturing group, `split` returns the words and also the text
    # between the words.
    pieces = _WORDS.split(user_header)
    # The role is a word that contains "user" in upper or lower case, such as "User" or
    # "user_message".
    regexes = [r"\w+" if _USER_WORD.fullmatch(piece) else re.escape(piece) for piece in pieces]
    return "".join(regexes)
