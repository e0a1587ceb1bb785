"""Render probe conversations with a chat template, and record the results of comparisons."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    NO_SWITCHES,
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
    Switches,
    forms_of_calls,
    forms_of_content,
)
from nereid_parsers.template.difference import Comparison, drop_common_suffix, text_after_last
from nereid_parsers.template.sandbox.environment import CompiledTemplate, RenderRefused

# These characters replace the number and the id of each tool call in a rendering, so that numbers
# and ids cause no difference between two renderings.
COUNTER_MARK = "\ue010"
ID_MARK = "\ue011"
# The description of a comparison in which the two conversations are equal.
UNCHANGED = "Nothing is changed."
_CALL_ID = re.compile(r"zq7id000\d")
_FIRST_CALL_ID = InputForm().call_id(FIRST_TOOL, 0)
_NUMBER_AFTER_NAME = re.compile(rf"({FIRST_TOOL}|{SECOND_TOOL})([:#.-])\d\b")

_SWITCH_NAME = re.compile(r"think|reason", re.IGNORECASE)
_NO_SWITCH_NAME = re.compile(
    r"content|prompt|history|start|end_token|begin|text|token|last|index|parts"
)
_EFFORTS = ("high", "low", "none", "enabled", "disabled")
_SYSTEM_SWITCHES = ("/think", "/no_think")
# Limits on the number of switches, so that an analysis finishes within its time limit.
_MAX_SWITCH_NAMES = 4
_MAX_SWITCH_VALUES = 6
_MAX_SWITCH_SETTINGS = 20

_UNDEFINED_VARIABLE = re.compile(r"'(\w+)' is undefined")


@dataclass(slots=True)
class Prober:
    """Renders probe conversations with one template, and stores the findings for the report.

    Attributes:
        template: The compiled template.
        bos, eos: The values of the template variables `bos_token` and `eos_token`.
        kwargs: Template variables that are set in every rendering.
        added_tokens: The tokens that were added to the tokenizer's vocabulary. Empty if they are
            not known.
        form: The form in which the template expects conversations. For example, `content` is a
            string or a list.
        refusals: For each conversation that failed to render, the error message.
        comparisons: The comparisons that were recorded for the report.
        undecided: Sentences for the report. Each sentence states what could not be inferred, and
            the reason.
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
    # The template failed because these variables were undefined. Therefore, all later renderings
    # set the variables to "".
    _filled: dict[str, str] = field(default_factory=dict)
    _cache: dict[tuple[Conversation, InputForm], str | None] = field(default_factory=dict)

    def render(self, conversation: Conversation, form: InputForm | None = None) -> str | None:
        """Render a conversation with the template and return the text.

        Placeholders (COUNTER_MARK and ID_MARK) replace the numbers and ids of tool calls, so that
        numbers and ids cause no difference between two renderings. The result is cached.

        Args:
            conversation: The conversation.
            form: The form in which the template expects the messages. For example, `content` is a
                string or a list. None means the attribute `form` of the prober.

        Returns:
            The text, or None if the template raises an error for this conversation.
        """
        used_form = form or self.form
        key = (conversation, used_form)
        if key not in self._cache:
            self._cache[key] = self._render(conversation, used_form)
        return self._cache[key]

    def _render(self, conversation: Conversation, form: InputForm) -> str | None:
        """Render a conversation without using the cache. Return None if the template fails.

        If the template fails because a variable is undefined, the method sets the variable to ""
        and renders the conversation again. In the result, placeholders replace the numbers and ids
        of tool calls, so that numbers and ids cause no difference between two renderings.

        Mutates: `_filled`, the variables that were set to "", and `refusals`, the error messages.
        """
        while True:  # Each pass, except the last pass, sets one more variable.
            try:
                text = self.template.render(self._variables(conversation, form))
            except RenderRefused as refusal:
                error_message = str(refusal)
                variable = self._undefined_variable(error_message)
                if variable is None:
                    self.refusals[conversation] = error_message
                    return None
                self._filled[variable] = ""
            else:
                return _mask_call_ids(text, form)

    def _variables(self, conversation: Conversation, form: InputForm) -> dict[str, Any]:
        """Return the template variables for a conversation, such as `messages` and `tools`.

        Three sources may set the same variable. A thinking switch of the conversation, such as
        enable_thinking=False, has the highest priority, then `kwargs`, and then `_filled`.
        `_filled` contains the variables that are set to "" because the template fails without them.

        Args:
            conversation: The conversation.
            form: The form in which the template expects the messages. For example, `content` is a
                string or a list.
        """
        has_tools = conversation.tools or form.always_tools
        return {
            "messages": form.messages(conversation),
            # The template gets a copy, because a template may change the list.
            "tools": copy.deepcopy(TOOLS) if has_tools else None,
            "documents": None,
            "add_generation_prompt": conversation.generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
            **self._filled,
            **self.kwargs,
            **dict(conversation.switches.variables),
        }

    def _undefined_variable(self, error_message: str) -> str | None:
        """Return the undefined variable that an error message of the template names.

        Example: the message "UndefinedError: 'today' is undefined" gives "today". Some templates
        read such variables, which only the model's own code sets. The prober sets the variable to
        "", and renders the conversation again.

        Return None for any other error. Also return None if setting the variable cannot help: the
        name is not a variable of the template, or the variable was already set.
        """
        match = _UNDEFINED_VARIABLE.search(error_message)
        if match is None:
            return None
        name = match.group(1)
        can_be_set = name in self.template.names and name not in self._filled
        return name if can_be_set else None

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
        left_text = unmask_call_ids(self.render(left) or "")
        right_text = unmask_call_ids(self.render(right) or "")
        self.comparisons.append(
            Comparison(name, changed, left=left_text, right=right_text, finding=finding)
        )

    def record_finding(self, name: str, finding: str) -> None:
        """Record a conclusion that the analysis has drawn without comparing two renderings.

        The report shows the conclusion as the finding of a comparison of two equal conversations.

        Args:
            name: The label of the finding, such as "R4 source".
            finding: The conclusion of the analysis, as a sentence.
        """
        question = Conversation()
        self.record(name, UNCHANGED, left=question, right=question, finding=finding)

    def record_undecided(self, sentence: str) -> None:
        """Add a sentence to `undecided`: what the analysis could not infer, and the reason.

        The report shows the sentence under the heading "Not decided".
        """
        self.undecided.append(sentence)

    # ---- the form of the input -------------------------------------------------------------------

    def find_content_form(self) -> InputForm | None:
        """Return the first form of messages in which the template renders content.

        Templates expect content in different forms. For example, `content` is a string or a list.
        A form is accepted if the rendered text contains the question and the content. Return None
        if the template accepts no form.
        """
        conversation = Conversation(AssistantMessage(CONTENT_TEXT))
        for form in forms_of_content():
            text = self.render(conversation, form) or ""
            if CONTENT_TEXT in text and USER_TEXT in text:
                return form
        return None

    def find_call_form(self) -> InputForm | None:
        """Return the first form of messages in which the template renders a whole tool call.

        Templates expect tool calls in different forms. For example, the arguments of a tool call
        are an object or a JSON string. The method combines the attribute `form`, which is the form
        of the content, with each form of tool calls. Return None if the template renders a whole
        tool call in none of these forms.
        """
        call = ProbeCall(arguments=TWO_ARGUMENTS)
        conversation = Conversation(AssistantMessage(calls=(call,)), tools=True)
        for form in forms_of_calls(self.form):
            if _shows_call(self._text_of_answer(conversation, form)):
                return form
        return None

    def _text_of_answer(self, conversation: Conversation, form: InputForm) -> str:
        """Render a conversation that offers tools, and return only the text of the answer.

        Most templates list the offered tools before the question, but some templates list them
        after the answer. The method also renders the question without an answer, to find out which
        text follows the answer. Example: the renderings "QUESTION ANSWER <tools>..</tools>" and
        "QUESTION <tools>..</tools>" give " ANSWER". Return "" if the template fails to render the
        conversation.
        """
        text = self.render(conversation, form)
        if text is None:
            return ""
        text_without_answer = self.render(Conversation(tools=True), form) or ""
        answer_and_tools = text_after_last(text, USER_TEXT)
        tools_at_end = text_after_last(text_without_answer, USER_TEXT)
        return drop_common_suffix(answer_and_tools, tools_at_end)

    # ---- the thinking switches -------------------------------------------------------------------

    def thinking_switches(self) -> list[Switches]:
        """Return the settings of the thinking switches with which the analysis renders prompts.

        A thinking switch turns thinking on or off. It is a template variable such as
        `enable_thinking`, or the word "/think" or "/no_think" in the system message. Example: if
        `enable_thinking` is the only switch of the template, the result contains three settings: no
        switch is set, enable_thinking=True, and enable_thinking=False.
        """
        names = self._switch_names()
        # Some templates render reasoning only if several switches are on.
        all_switches = _all_on_and_all_off(names) if len(names) > 1 else []
        one_switch = [
            Switches(((name, value),)) for name in names for value in self._switch_values(name)
        ]
        settings = [NO_SWITCHES, *all_switches, *one_switch, *self._system_switches()]
        return settings[:_MAX_SWITCH_SETTINGS]

    def _switch_names(self) -> list[str]:
        """Return the template variables that turn thinking on or off, such as `enable_thinking`.

        The variables in `kwargs` are omitted, because their values are fixed.
        """
        names = sorted(name for name in self.template.names if is_thinking_switch(name))
        return [name for name in names[:_MAX_SWITCH_NAMES] if name not in self.kwargs]

    def _system_switches(self) -> list[Switches]:
        """Return the settings that turn thinking on or off with a word in the system message.

        The words are "/think" and "/no_think". The result contains one setting for each of these
        words that the template contains.
        """
        template_text = "\n".join(self.template.literals)
        return [Switches(system=word) for word in _SYSTEM_SWITCHES if word in template_text]

    def _switch_values(self, name: str) -> list[Any]:
        """Return the values that the analysis tries for the template variable `name`.

        The variable turns thinking on or off. The first values are the constants with which the
        template compares the variable. Then the usual values follow: True and False, or words such
        as "high" and "low". Example: for `thinking_mode` in a template with
        `{% if thinking_mode == "fast" %}`, the result is ["fast", "high", "low", ..].
        """
        constants = self.template.compared.get(name, ())
        compared_values = [value for value in constants if isinstance(value, str | int)]
        is_effort = "effort" in name or "mode" in name  # such as `reasoning_effort`
        usual_values: tuple[Any, ...] = _EFFORTS if is_effort else (True, False)
        # The dict removes duplicates. The keys are texts, because True and 1 would be equal keys.
        value_by_text = {repr(value): value for value in (*compared_values, *usual_values)}
        return list(value_by_text.values())[:_MAX_SWITCH_VALUES]


def is_thinking_switch(name: str) -> bool:
    """Return whether a template variable with this name may turn thinking on or off.

    >>> is_thinking_switch("enable_thinking"), is_thinking_switch("reasoning_content")
    (True, False)
    """
    return bool(_SWITCH_NAME.search(name)) and not _NO_SWITCH_NAME.search(name)


def _all_on_and_all_off(names: list[str]) -> list[Switches]:
    """Return two settings: all given template variables are True, and all of them are False."""
    all_on = Switches(tuple((name, True) for name in names))
    all_off = Switches(tuple((name, False) for name in names))
    return [all_on, all_off]


def _mask_call_ids(text: str, form: InputForm) -> str:
    r"""Replace the numbers and ids of tool calls with placeholders.

    COUNTER_MARK replaces each number, and ID_MARK replaces each id. Example: `zqFirstTool:1` has
    the number 1.

    >>> _mask_call_ids("zqFirstTool:1 id=zq7id0001", InputForm())
    'zqFirstTool:\ue010 id=\ue011'
    """
    text = _NUMBER_AFTER_NAME.sub(rf"\1\2{COUNTER_MARK}", text)
    return text if form.ids == "numbered" else _CALL_ID.sub(ID_MARK, text)


def unmask_call_ids(text: str) -> str:
    r"""Replace the placeholders in a rendered text with the number and the id of a tool call.

    COUNTER_MARK becomes the number 0, and ID_MARK becomes the id of the first tool call.

    >>> unmask_call_ids("zqFirstTool:\ue010 id=\ue011")
    'zqFirstTool:0 id=zq7id0000'
    """
    return text.replace(COUNTER_MARK, "0").replace(ID_MARK, _FIRST_CALL_ID)


def _shows_call(text: str) -> bool:
    r"""Return whether a rendered text contains the tool call as a model would write it.

    If the messages have a form that the template does not expect, the template renders the tool
    call wrongly. The function returns False in these cases:

    - The name or an argument is missing.
    - The arguments are printed as a Python dict, or as JSON inside a JSON string.
    - "None" precedes the tool call, because the template prints the empty content.

    >>> arguments = '"zqKeyOne": "zqValueOne", "zqKeyTwo": "zqValueTwo"'
    >>> _shows_call(f"zqFirstTool{{{arguments}}}"), _shows_call(f"None zqFirstTool{{{arguments}}}")
    (True, False)
    """
    before_name, _, after_name = text.partition(FIRST_TOOL)
    shows_none = "None" in before_name
    shows_python_dict = f"'{FIRST_KEY}'" in text
    shows_escaped_json = f'\\"{FIRST_KEY}' in text  # In a JSON string, quotes are escaped: `\"`.
    if shows_none or shows_python_dict or shows_escaped_json:
        return False
    # If the name is missing, `after_name` is empty and contains no argument.
    words_of_arguments = (FIRST_KEY, FIRST_VALUE, SECOND_KEY, SECOND_VALUE)
    return all(word in after_name for word in words_of_arguments)
