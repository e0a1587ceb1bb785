r"""The class `Format`, which describes how a model writes reasoning, content and tool calls.

Example of a declaration:

    Format(
        "example",
        Sections(
            reasoning=Reasoning("<think>\\n", "\\n</think>\\n\\n"),
            tools=ToolSection((Call(JsonObject(), "<tool_call>\\n", close="\\n</tool_call>"),)),
        ),
    )

This module also exports all classes that a declaration may use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nereid_parsers.constraints.constrain import reasoning_gate, structural_tag
from nereid_parsers.constraints.constrain_reasoning import reasoning_state
from nereid_parsers.constraints.constrain_request import Request
from nereid_parsers.declarations import (
    FormatData,
    Messages,
    Opener,
    Reasoning,
    ReasoningGate,
    Route,
    Sections,
    Shown,
    Source,
    Stage,
    Wrapper,
)
from nereid_parsers.pattern_syntax import PatternField, split_pattern
from nereid_parsers.policy import (
    LENIENT,
    STRICT,
    BrokenArguments,
    Policy,
    StrayClose,
    TextRule,
    UnknownTool,
)
from nereid_parsers.stream.parser import output_start
from nereid_parsers.tool_declarations import (
    BareKeyArguments,
    Body,
    Call,
    JsonArguments,
    JsonArray,
    JsonObject,
    Keys,
    NameIsKey,
    NestedTags,
    PythonCalls,
    TaggedArguments,
    ToolSection,
)

__all__ = [
    "LENIENT",
    "STRICT",
    "BareKeyArguments",
    "Body",
    "BrokenArguments",
    "Call",
    "Format",
    "JsonArguments",
    "JsonArray",
    "JsonObject",
    "Keys",
    "Messages",
    "NameIsKey",
    "NestedTags",
    "Opener",
    "PatternField",
    "Policy",
    "PythonCalls",
    "Reasoning",
    "ReasoningGate",
    "Route",
    "Sections",
    "Shown",
    "Source",
    "Stage",
    "StrayClose",
    "TaggedArguments",
    "TextRule",
    "ToolSection",
    "UnknownTool",
    "Wrapper",
    "split_pattern",
]


@dataclass(frozen=True, slots=True)
class Format(FormatData):
    """Describes how a model writes its output. See `FormatData` for the attributes.

    Two formats with equal attributes are equal and have equal hashes.
    """

    def with_policy(self, policy: Policy) -> Format:
        """Return a copy of this chat format with the given policy."""
        return replace(self, policy=policy)

    def stage(self, prompt: str | None) -> Stage:
        r"""Return the stage in which the output starts, such as reasoning (`Stage.REASONING`).

        Example: a format with the opening marker `<think>` returns `Stage.REASONING` for the prompt
        `"<|im_start|>assistant\n<think>\n"`. If the output starts in the header of a message, the
        result is `Stage.CONTENT`.

        Args:
            prompt: The rendered prompt, including its generation prompt. None if the prompt is not
                known.
        """
        return output_start(self, prompt).stage

    def structural_tag(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        *,
        parallel_tool_calls: bool = True,
        prompt: str | None = None,
        skip_reasoning: bool = False,
    ) -> dict[str, Any] | None:
        """Return the structural tag for a request, or None if the request allows any output.

        A structural tag is the JSON object from which xgrammar builds the grammar of the output.
        The grammar allows only valid tool calls, and answers of the requested form.

        Args:
            tools: The OpenAI tools list.
            tool_choice: The OpenAI field `tool_choice`.
            response_format: The OpenAI field `response_format`. The types structural_tag, regex,
                grammar and choice are supported too, see `constrain_answer.answer_node`.
            parallel_tool_calls: Whether the model may make more than one tool call.
            prompt: The rendered prompt, or None if the prompt is not known.
            skip_reasoning: Whether the structural tag describes only the text after the reasoning.

        Raises:
            ConstraintError: The request is invalid, or cannot be expressed as a structural tag of
                this format.
        """
        request = Request.of(
            tools, tool_choice, response_format, parallel_tool_calls=parallel_tool_calls
        )
        reasoning = reasoning_state(output_start(self, prompt), skip_reasoning)
        return structural_tag(self, request, reasoning)

    def reasoning_gate(self, prompt: str | None = None) -> ReasoningGate | None:
        """Return the markers around the reasoning, and whether `prompt` ends inside the reasoning.

        Return None if the format has no reasoning, or if no marker closes the reasoning.
        """
        return reasoning_gate(self, output_start(self, prompt))
