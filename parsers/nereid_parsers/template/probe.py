"""Render invented conversations with a chat template, and record comparisons of the renderings."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    SECOND_KEY,
    SECOND_TOOL,
    SECOND_VALUE,
    TOOLS,
    TWO_ARGUMENTS,
    USER_TEXT,
    AssistantMessage,
    Conversation,
    InputForm,
    ProbeCall,
    forms_of_calls,
    forms_of_content,
)
from nereid_parsers.template.markup.difference import (
    Comparison,
    drop_common_suffix,
    text_after_last,
)
from nereid_parsers.template.sandbox.compile_template import CompiledTemplate, RenderRefused

# These characters replace the number and the id of each tool call in a rendering. No text contains
# these characters, because Unicode reserves them for internal use. Without the replacement, two
# renderings would also differ in these numbers and ids.
COUNTER_MARK = "\ufdd0"
ID_MARK = "\ufdd1"
# The value of `Comparison.changed` if the two compared conversations are equal.
UNCHANGED = "Nothing is changed."
_CALL_ID = re.compile(r"zq7id000\d")
_FIRST_CALL_ID = InputForm().call_id(FIRST_TOOL, 0)
_NUMBER_AFTER_NAME = re.compile(rf"({FIRST_TOOL}|{SECOND_TOOL})([:#.-])\d\b")

# The user asks a question, and the assistant answers with content alone.
_PLAIN_ANSWER = Conversation(AssistantMessage(CONTENT_TEXT))


@dataclass(slots=True)
class Prober:
    """Renders invented conversations with one template, and stores the findings for the report.

    Attributes:
        template: The compiled template.
        bos, eos: The values of the template variables `bos_token` and `eos_token`.
        kwargs: Template variables that are set in every rendering.
        added_tokens: The tokens that were added to the tokenizer's vocabulary. Empty if they are
            not known.
        form: The form in which the template expects conversations. For example, `content` is a
            string or a list.
        refusals: The error messages of the template, by the conversation that failed to render.
        comparisons: The comparisons that were recorded for the report.
        undecided: Sentences for the report. Each sentence states what could not be inferred, and
            the reason. The report shows the sentences under the heading "Not decided".
    """

    template: CompiledTemplate
    bos: str
    eos: str
    kwargs: Mapping[str, Any]
    added_tokens: frozenset[str] = frozenset()
    form: InputForm = field(default_factory=InputForm)

    refusals: dict[Conversation, str] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    # The names of variables that the template requires. Every rendering sets these variables to "".
    _blank_variables: set[str] = field(default_factory=set)
    _cache: dict[tuple[Conversation, InputForm], str | None] = field(default_factory=dict)

    def render(self, conversation: Conversation, form: InputForm | None = None) -> str | None:
        """Render a conversation with the template and return the text.

        The result is None if the template raises an error for this conversation. In the text,
        placeholders (COUNTER_MARK and ID_MARK) replace the numbers and ids of tool calls, so that
        numbers and ids cause no difference between two renderings. The text is cached. `form` is
        the form of the messages; None means the attribute `form` of the prober.
        """
        used_form = self.form if form is None else form
        key = (conversation, used_form)
        if key not in self._cache:
            self._cache[key] = self._render(conversation, used_form)
        return self._cache[key]

    def _render(self, conversation: Conversation, form: InputForm) -> str | None:
        r"""Render a conversation without using the cache. Return None if the template fails.

        If the template fails because a variable is undefined, the method sets this variable to ""
        and renders the conversation again. In the result, placeholders replace the numbers and ids
        of tool calls. Example: `zqFirstTool:1 id=zq7id0001` becomes `zqFirstTool:\ufdd0 id=\ufdd1`.

        Mutates: `_blank_variables`, to which such a variable is added. If the template fails for
            another reason, the error message is stored in `refusals`.
        """
        # The loop ends, because each pass sets one more of the template's variables to "".
        while True:
            try:
                text = self.template.render(self._variables(conversation, form))
            except RenderRefused as refusal:
                was_set = self._set_undefined_variable(refusal.undefined_variable)
                if not was_set:
                    self.refusals[conversation] = str(refusal)
                    return None
            else:
                return _mask_numbers_and_ids(text, form)

    def _variables(self, conversation: Conversation, form: InputForm) -> dict[str, Any]:
        """Return the template variables for a conversation, such as `messages` and `tools`.

        Example: {"messages": [..], "tools": None, "bos_token": "<s>", "enable_thinking": False, ..}
        """
        # Some templates fail without tools. For these templates, `form.always_tools` is true.
        offers_tools = conversation.tools or form.always_tools
        variables: dict[str, Any] = {
            "messages": form.messages(conversation),
            # The list of tools is copied, because a template may change the list.
            "tools": copy.deepcopy(TOOLS) if offers_tools else None,
            "documents": None,  # Transformers passes documents to the template, or None.
            "add_generation_prompt": conversation.generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
        }
        # Later values replace earlier values of the same variable. The first line sets the
        # variables that were missing in an earlier rendering, which failed for this reason.
        variables |= dict.fromkeys(self._blank_variables, "")
        variables |= self.kwargs  # The variables that the user of the analysis has set.
        variables |= dict(conversation.switches.variables)  # Such as enable_thinking=False.
        return variables

    def _set_undefined_variable(self, variable: str | None) -> bool:
        """Set a variable to "" in all later renderings. Return whether the variable was set.

        The variable is not set in three cases: if `variable` is None, because the rendering failed
        for another reason than an undefined variable; if the template reads no variable with this
        name; and if an earlier call has already set the variable.
        """
        if variable not in self.template.names or variable in self._blank_variables:
            return False
        self._blank_variables.add(variable)
        return True

    def error_message(self, conversation: Conversation) -> str | None:
        """Render a conversation. Return the template's error message, or None without an error.

        Example: the result is "UndefinedError: 'today' is undefined".
        """
        # If the template fails, `render` adds the error message to `refusals`.
        self.render(conversation)
        return self.refusals.get(conversation)

    def record(
        self, name: str, changed: str, left: Conversation, right: Conversation, finding: str
    ) -> None:
        """Render two conversations, and add a comparison of the two renderings to `comparisons`.

        The report shows the two renderings and the conclusion that the analysis draws from their
        difference, so that a user can check the conclusion.

        Args:
            name: The label of the comparison, such as "R1 reasoning presence".
            changed: What differs between `left` and `right`.
            left: The first conversation. If the template fails to render a conversation, the report
                shows "" instead.
            right: The second conversation.
            finding: What the analysis concludes from the difference.

        Mutates: `comparisons`.
        """
        left_text = self._text_for_report(left)
        right_text = self._text_for_report(right)
        self.comparisons.append(
            Comparison(name, changed, left=left_text, right=right_text, finding=finding)
        )

    def record_source_finding(self, name: str, finding: str) -> None:
        """Record a finding about the source of the template, for the report.

        Example of a finding: "A string constant of the template contains '</think>'." Each entry of
        the report consists of a finding and two renderings. For this finding, both are the
        rendering of a question, so the report shows no difference.

        Args:
            name: The label of the finding, such as "R4 source".
            finding: What the analysis concludes from the source.

        Mutates: `comparisons`.
        """
        rendering = self._text_for_report(Conversation())
        self.comparisons.append(
            Comparison(name, UNCHANGED, left=rendering, right=rendering, finding=finding)
        )

    def _text_for_report(self, conversation: Conversation) -> str:
        """Render a conversation, and return the text that the report shows.

        The result contains the numbers and ids of tool calls instead of placeholders. It is "" if
        the template fails to render the conversation.
        """
        return restore_numbers_and_ids(self.render(conversation) or "")

    # ---- the form of the input -------------------------------------------------------------------

    def choose_content_form(self) -> None:
        """Set `form` to a form of the content, such as a string or a list, that can be rendered.

        Mutates: `form`. If the template cannot render any form of the content, `form` remains
            unchanged, and a sentence with the reason is added to `undecided`.
        """
        form = self._find_content_form()
        if form is not None:
            self.form = form
            return
        # `refusals` contains the template's last error message for this conversation, if any.
        reason = self.refusals.get(_PLAIN_ANSWER, "the rendering does not contain the content")
        self.undecided.append(f"The template does not render plain content: {reason}")

    def _find_content_form(self) -> InputForm | None:
        """Find a form of the content, such as a string or a list, that the template can render.

        The method renders a question and an answer in all possible forms. The result is the first
        form for which the rendered text contains the question and the answer, or None.
        """
        for form in forms_of_content():
            text = self.render(_PLAIN_ANSWER, form) or ""
            if CONTENT_TEXT in text and USER_TEXT in text:
                return form
        return None

    def find_call_form(self, content_form: InputForm) -> InputForm | None:
        """Return the first form of the input for which the template renders a complete tool call.

        The method tries several forms. All of them have the same form of the content, which is that
        of `content_form`, but different forms of tool calls: for example, the arguments are an
        object or a JSON string. The result is None if the template renders a complete tool call for
        none of these forms.
        """
        call = ProbeCall(arguments=TWO_ARGUMENTS)
        conversation = Conversation(AssistantMessage(calls=(call,)), tools=True)
        for form in forms_of_calls(content_form):
            if _shows_call(self._text_of_answer(conversation, form)):
                return form
        return None

    def _text_of_answer(self, conversation: Conversation, form: InputForm) -> str:
        """Render a conversation that offers tools. Return the answer without the list of tools.

        Most templates list the offered tools before the question, but some templates list them
        after the answer. To find this list, the method also renders the question without an answer.
        Example: the renderings "QUESTION ANSWER <tools>..</tools>" and "QUESTION <tools>..</tools>"
        give " ANSWER".

        Return "" if the template fails to render the conversation.
        """
        text = self.render(conversation, form)
        if text is None:
            return ""
        answer_and_tools = text_after_last(text, USER_TEXT)
        unanswered_question = replace(conversation, answer=None)
        # If the template fails to render the unanswered question, no list of tools is removed.
        unanswered_text = self.render(unanswered_question, form) or ""
        text_after_question = text_after_last(unanswered_text, USER_TEXT)
        return drop_common_suffix(answer_and_tools, text_after_question)


def _mask_numbers_and_ids(text: str, form: InputForm) -> str:
    r"""In a rendered text, replace the numbers and ids of tool calls with placeholders.

    COUNTER_MARK replaces each number, and ID_MARK replaces each id. Example: `zqFirstTool:1` has
    the number 1.

    >>> _mask_numbers_and_ids("zqFirstTool:1 id=zq7id0001", InputForm())
    'zqFirstTool:\ufdd0 id=\ufdd1'
    """
    text = _NUMBER_AFTER_NAME.sub(rf"\1\2{COUNTER_MARK}", text)
    return text if form.ids == "numbered" else _CALL_ID.sub(ID_MARK, text)


def restore_numbers_and_ids(text: str) -> str:
    r"""In a rendered text, replace the placeholders with the number and the id of a tool call.

    COUNTER_MARK becomes the number 0, and ID_MARK becomes the id of the first tool call.

    >>> restore_numbers_and_ids("zqFirstTool:\ufdd0 id=\ufdd1")
    'zqFirstTool:0 id=zq7id0000'
    """
    return text.replace(COUNTER_MARK, "0").replace(ID_MARK, _FIRST_CALL_ID)


def _shows_call(text: str) -> bool:
    r"""Return whether `text` contains a correctly rendered tool call.

    If the messages have a form that the template does not expect, the template renders the tool
    call wrongly. The function returns False in these cases:

    - The name or an argument is missing.
    - The arguments are printed as a Python dict, or as JSON inside a JSON string.
    - "None" precedes the tool call, because the template prints the empty content.

    >>> arguments = '"zqKeyOne": "zqValueOne", "zqKeyTwo": "zqValueTwo"'
    >>> _shows_call(f"zqFirstTool{{{arguments}}}"), _shows_call(f"None zqFirstTool{{{arguments}}}")
    (True, False)
    """
    # If the name is missing, `after_name` is "", which contains no argument.
    before_name, _, after_name = text.partition(FIRST_TOOL)
    words_of_arguments = (FIRST_KEY, FIRST_VALUE, SECOND_KEY, SECOND_VALUE)
    if not all(word in after_name for word in words_of_arguments):
        return False
    shows_python_dict = f"'{FIRST_KEY}'" in text
    shows_escaped_json = f'\\"{FIRST_KEY}' in text  # In a JSON string, quotes are escaped: `\"`.
    shows_none = "None" in before_name
    return not (shows_python_dict or shows_escaped_json or shows_none)
