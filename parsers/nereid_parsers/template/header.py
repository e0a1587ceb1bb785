"""Find the header, the text that opens every assistant message: `<|im_start|>assistant`."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
from nereid_parsers.template.markup.difference import common_prefix, text_after_last, tokens
from nereid_parsers.template.markup.marker_pairs import closing_spellings
from nereid_parsers.template.markup.markers import MARKER, trailing_marker
from nereid_parsers.template.model_turn import GenerationPrompt, ModelTurn, prompt_after_header
from nereid_parsers.template.probe import Prober
from nereid_parsers.template.reasoning.thinking_switches import thinking_switches

_USER_WORD = re.compile(r"\w*user\w*", re.IGNORECASE)
_MAX_USER_HEADER = 80  # the maximum length of the header of a user message, in characters

_QUESTION = Conversation()
_PROMPT = Conversation(generation_prompt=True)
# The renderings of these conversations contain the header of an assistant message.
_CONVERSATIONS_WITH_ANSWERS = (
    Conversation(AssistantMessage(CONTENT_TEXT)),
    Conversation(AssistantMessage(CONTENT_TEXT), user_replies=True),
    conversation_with_calls(*ONE_CALL),
)


def find_model_turn(prober: Prober) -> ModelTurn:
    r"""Find the texts around the model's answers, such as the header of an assistant message.

    Example: the generation prompt is "<|im_start|>assistant\n<think>\n". Rendered messages without
    reasoning contain only the part "<|im_start|>assistant\n", so this part is the header.

    Mutates: `prober`, which records for the report how a prompt opens the answer.
    """
    rendered_prompts = _rendered_prompts(prober)
    header = _find_header(prober, [text for _, text in rendered_prompts])
    prompts = tuple(
        GenerationPrompt(switches, text, prompt_after_header(text, header))
        for switches, text in rendered_prompts
    )
    _record_generation_prompt(prober, finding=_describe_header(header, prompts))
    after_user_message = text_after_last(_rendered_question(prober), USER_TEXT)
    return ModelTurn(prober, header, prompts, after_user_message=after_user_message)


def _rendered_question(prober: Prober) -> str:
    """Render a user's question without a generation prompt. Return "" if the template fails."""
    return prober.render(_QUESTION) or ""


def _record_generation_prompt(prober: Prober, finding: str) -> None:
    """Record a comparison for the report: a question without and with a generation prompt.

    The generation prompt is the text that opens the model's answer. In the report, the comparison
    has the label "G". `finding` describes the header that the analysis has found.

    Mutates: `prober.comparisons`.
    """
    prober.record(
        "G generation prompt",
        "add_generation_prompt is true.",
        left=_QUESTION,
        right=_PROMPT,
        finding=finding,
    )


def _rendered_prompts(prober: Prober) -> list[tuple[Switches, str]]:
    """Render a question as a prompt for each thinking setting, such as `enable_thinking=False`.

    The result contains each setting with the rendered text. A setting is omitted if the template
    fails to render the question with this setting.
    """
    prompts = []
    for switches in thinking_switches(prober.template, fixed_variables=prober.kwargs):
        text = prober.render(Conversation(generation_prompt=True, switches=switches))
        if text is not None:
            prompts.append((switches, text))
    return prompts


def _describe_header(header: str, prompts: Sequence[GenerationPrompt]) -> str:
    """Describe the header of assistant messages, such as `<|assistant|>`, for the report.

    If the first prompt continues after the header, the description contains this text, too:
    "The turn opens with '<|assistant|>'. The prompt continues with '<think>'."
    """
    finding = f"The turn opens with {header!r}."
    if prompts and prompts[0].after_header:
        finding += f" The prompt continues with {prompts[0].after_header!r}."
    return finding


def _find_header(prober: Prober, prompts: Sequence[str]) -> str:
    """Return the header, which is the text that opens every assistant message.

    The first step finds the text with which the model's turn starts in every rendered prompt and in
    every rendered answer. The second step removes the start of the answer from this text. Example:

        the end of a prompt      <|assistant|><think>
        a rendered answer        <|assistant|><think></think>Hello
        after the first step     <|assistant|><think>
        after the second step    <|assistant|>

    `prompts` contains the rendered prompts, one for each setting of the thinking switches.
    """
    answers = _rendered_answers(prober)
    turn_start = _find_turn_start(prober, prompts, answers)
    # Except for the role, the header of a user's message has the same form as the header of an
    # assistant message. Therefore, the user's header shows where the assistant's header ends.
    user_header = _user_header(_rendered_question(prober))
    return _drop_start_of_answer(turn_start, answers, user_header)


def _find_turn_start(prober: Prober, prompts: Sequence[str], answers: Sequence[str]) -> str:
    """Return the text with which the model's turn starts in all renderings.

    Usually, the result is the start of the generation prompt that occurs in all renderings.
    Example: one prompt ends with `<|assistant|>`, and another prompt ends with
    `<|assistant|><think>`. The result is `<|assistant|>`.

    Some templates ignore `add_generation_prompt`, and write the assistant's header after each
    question, as in `QUESTION<|end|><|assistant|>`. Then the result is the text with which all
    answers start after the question: `<|end|><|assistant|>`.

    Args:
        prober: Renders conversations with the template.
        prompts: The rendered prompts, one for each setting of the thinking switches.
        answers: The text after the user's question in each rendered answer.
    """
    question = _rendered_question(prober)
    default_prompt = prober.render(_PROMPT) or question  # The template may fail to render a prompt.
    generation_prompt = _cut_generation_prompt(question, default_prompt)
    if not generation_prompt.strip():  # The template ignores `add_generation_prompt`.
        after_question = text_after_last(default_prompt, USER_TEXT)
        return _common_start_of_answers(after_question, answers)
    prompt_ends = [text_after_last(prompt, USER_TEXT) for prompt in prompts]
    return _prefix_in_all_renderings(generation_prompt, [*answers, *prompt_ends])


def _drop_start_of_answer(turn_start: str, answers: Sequence[str], user_header: str) -> str:
    """Remove the text after the header, because this text is the start of the answer.

    Three steps remove different texts that may follow the header in every answer: an empty block of
    reasoning, the opening marker of reasoning, and text that a header of this form cannot contain.
    In this example, `<|assistant|>` is the header:

    >>> _drop_start_of_answer("<|assistant|><think></think>", [], user_header="<|user|>")
    '<|assistant|>'
    """
    without_block = _drop_empty_block(turn_start)
    without_marker = _drop_opening_marker(without_block, answers)
    return _drop_text_after_role(without_marker, user_header)


def _cut_generation_prompt(without_prompt: str, with_prompt: str) -> str:
    r"""Return the generation prompt, which is the text that opens the model's answer.

    A template writes the generation prompt after the user's question. Only the texts after the
    question are compared, because some templates also change the system message when they write
    the generation prompt.

    >>> _cut_generation_prompt(f"{USER_TEXT}<|end|>", f"{USER_TEXT}<|end|><|start|>assistant")
    '<|start|>assistant'
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
    for conversation in _CONVERSATIONS_WITH_ANSWERS:
        text = prober.render(conversation)
        if text is not None and USER_TEXT in text:
            answers.append(text_after_last(text, USER_TEXT).replace(EOS_TOKEN, ""))
    return answers


def _prefix_in_all_renderings(generation_prompt: str, renderings: Sequence[str]) -> str:
    r"""Return the longest prefix of `generation_prompt` that occurs anywhere in each rendering.

    In a rendering, the text that ends the user's question, such as `<|end|>`, may precede the
    prefix. Renderings that contain no prefix are ignored, because they contain no header. If all
    renderings are ignored, the result is the whole generation prompt.

    >>> _prefix_in_all_renderings("<|a|><think>", ["<|end|><|a|>Hello", "<|end|><|a|><think>"])
    '<|a|>'
    """
    # In the example, these prefixes are `<|a|>` and `<|a|><think>`. The shortest of them occurs in
    # all renderings.
    prefixes = [_longest_prefix_in(rendering, generation_prompt) for rendering in renderings]
    found_prefixes = [prefix for prefix in prefixes if prefix]
    return min(found_prefixes, key=len, default=generation_prompt)


def _common_start_of_answers(after_question: str, answers: Sequence[str]) -> str:
    """Return the longest prefix of `after_question` with which each of the `answers` starts.

    All these texts follow a user's question in a rendering. The result is "" if there are no
    answers.

    >>> _common_start_of_answers("<|end|><|a|>", ["<|end|><|a|>Hello", "<|end|><|a|><call>"])
    '<|end|><|a|>'
    """
    prefixes = [common_prefix(after_question, answer) for answer in answers]
    return min(prefixes, key=len, default="")


def _longest_prefix_in(rendering: str, generation_prompt: str) -> str:
    r"""Return the longest prefix of `generation_prompt` that occurs anywhere in `rendering`.

    The prefix consists of whole tokens: markers such as `<think>`, words and single characters. The
    result is "" if no prefix occurs in `rendering`, or only white space.

    >>> _longest_prefix_in("\n<|assistant|>\nHello", "<|assistant|>\n<think>\n")
    '<|assistant|>\n'
    """
    prompt_tokens = tokens(generation_prompt)
    num_tokens = _num_leading_tokens_in(rendering, prompt_tokens)
    prefix = "".join(prompt_tokens[:num_tokens])
    return prefix if prefix.strip() else ""


def _num_leading_tokens_in(rendering: str, prompt_tokens: list[str]) -> int:
    """Return the number of tokens in the longest prefix that occurs in `rendering`.

    If a prefix does not occur, all longer prefixes do not occur, either. Therefore, a binary search
    finds the longest prefix. Trying all prefixes takes too long for a long prompt.

    >>> _num_leading_tokens_in("<|end|><|a|>Hello", ["<|a|>", "<think>", "Hello"])
    1
    """
    num_found = 0  # A prefix with this number of tokens occurs.
    num_missing = len(prompt_tokens) + 1  # No prefix with this number of tokens occurs.
    while num_missing - num_found > 1:
        num_tokens = (num_found + num_missing) // 2
        if "".join(prompt_tokens[:num_tokens]) in rendering:
            num_found = num_tokens
        else:
            num_missing = num_tokens
    return num_found


def _drop_empty_block(turn_start: str) -> str:
    """Remove an empty block of reasoning, such as `<think></think>`, from the end of `turn_start`.

    `turn_start` consists of the header of an assistant message and of such a block, if the template
    writes the block before every answer. Other text is returned unchanged.

    >>> _drop_empty_block("<|assistant|><think></think>")
    '<|assistant|>'
    """
    all_markers = list(MARKER.finditer(turn_start))
    if len(all_markers) < 2:  # A block consists of two markers.
        return turn_start
    opening, closing = all_markers[-2:]
    if closing.group() not in closing_spellings(opening.group()):
        return turn_start
    text_inside = turn_start[opening.end() : closing.start()]
    text_after = turn_start[closing.end() :]
    if text_inside.strip() or text_after.strip():
        return turn_start
    return turn_start[: opening.start()]


def _drop_opening_marker(turn_start: str, answers: Sequence[str]) -> str:
    """Remove the opening marker of reasoning, such as `<think>`, from the end of `turn_start`.

    `turn_start` is the text with which the model's turn starts in all renderings. Some templates
    write `<think>` after the header of every answer, so `turn_start` ends with this marker. If
    `turn_start` does not end with an opening marker, it is returned unchanged.

    In the example, `</think>` follows `<think>` in an answer. This shows that `<think>` opens
    reasoning, and is not a part of the header:

    >>> answer = f"<|assistant|><think></think>{CONTENT_TEXT}"
    >>> _drop_opening_marker("<|assistant|><think>", [answer])
    '<|assistant|>'
    """
    last_marker = trailing_marker(turn_start)
    if not last_marker:
        return turn_start
    opens_reasoning = _is_closed_in_answers(last_marker, turn_start, answers)
    before_marker, _, _ = turn_start.rpartition(last_marker)
    return before_marker if opens_reasoning else turn_start


def _is_closed_in_answers(marker: str, turn_start: str, answers: Sequence[str]) -> bool:
    """Return whether the closing marker for `marker` follows `turn_start` in one of the answers.

    `marker` is the last marker of `turn_start`. If it opens reasoning, it is closed at once in
    an answer without reasoning:

    >>> answer = f"<|assistant|><think></think>{CONTENT_TEXT}"
    >>> _is_closed_in_answers("<think>", "<|assistant|><think>", [answer])
    True
    """
    closing_markers = tuple(closing_spellings(marker))
    # Only answers with content are used, because in other answers, the next marker may belong to a
    # tool call. White space around `turn_start` is ignored, because it may vary.
    answers_with_content = [answer for answer in answers if CONTENT_TEXT in answer]
    texts_after = [answer.partition(turn_start.strip())[2] for answer in answers_with_content]
    return any(text.lstrip().startswith(closing_markers) for text in texts_after)


def _user_header(rendered_question: str) -> str:
    r"""Return the text, such as `<|user|>`, that opens the user's message, or "" if none is found.

    The header ends at the user's question. It starts with the last marker that precedes the role
    "user", as in `<|start|>user`, or that contains the role, as in `<|user|>`:

    >>> _user_header(f"<|bos|><|start|>user\n{USER_TEXT}<|end|>")
    '<|start|>user\n'
    """
    before_question, _, _ = rendered_question.rpartition(USER_TEXT)
    # Only the last characters before the question are searched, because earlier text may belong to
    # a system message.
    end_of_text = before_question[-_MAX_USER_HEADER:]
    roles = list(_USER_WORD.finditer(end_of_text))
    if not roles:
        return ""
    last_role_start = roles[-1].start()
    # In `<|start|>user` and in `<|user|>`, the marker starts before the word "user".
    marker_starts = [marker.start() for marker in MARKER.finditer(end_of_text)]
    starts_before_role = [start for start in marker_starts if start <= last_role_start]
    return end_of_text[starts_before_role[-1] :] if starts_before_role else ""


def _drop_text_after_role(turn_start: str, user_header: str) -> str:
    r"""Remove text that belongs to the answer, such as `<think>`, from the end of `turn_start`.

    The header of an assistant message has the form of a user's header, but contains the role
    "assistant" instead of "user". Therefore, the user's header shows where the header of the
    assistant message ends:

    >>> _drop_text_after_role("<|start|>assistant\n<think>\n", user_header="<|start|>user\n")
    '<|start|>assistant\n'

    Return `turn_start` unchanged if `user_header` is "", or if the headers have different forms.
    """
    if not user_header:
        return turn_start
    # The last match is the header of the assistant message. Earlier matches are the headers of
    # other messages.
    matches = list(re.finditer(_regex_of_headers(user_header), turn_start))
    return turn_start[: matches[-1].end()] if matches else turn_start


def _regex_of_headers(user_header: str) -> str:
    r"""Return a regular expression that matches the header of any role.

    The role in a user's header is a word that contains "user" in upper or lower case, such as
    "User" or "user_message". The expression accepts any other word in place of the role.

    >>> _regex_of_headers("<start>user<sep>")
    '<start>\\w+<sep>'
    """
    texts_around_role = _USER_WORD.split(user_header)
    return r"\w+".join(re.escape(text) for text in texts_around_role)
