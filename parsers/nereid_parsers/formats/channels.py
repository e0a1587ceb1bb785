"""Describes models whose output is a sequence of messages or blocks. For gpt-oss, see gpt_oss.py.

A marker at the start of each message or block defines whether the text is reasoning, content or a
tool call.
"""

from nereid_parsers.declarations import Messages, Reasoning, Route, Source, Stage, Wrapper
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import (
    Call,
    JsonArguments,
    JsonObject,
    Keys,
    TaggedArguments,
    ToolSection,
)

_INKLING = Source("inkling parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11")
_MUSE = Source("muse parsers of vLLM 0.33.0, muse detector of SGLang 0.5.23", "2026-11")
_PLAMO = Source("plamo3 parser of vLLM 0.33.0", "2026-11")
_FUNCTIONARY = Source("chat template of meetkai/functionary-medium-v3.2", "2024-08")
_FUNCTIONARY31 = Source("chat template of meetkai/functionary-medium-v3.1", "2024-07")

_INKLING_ENDS = ("<|content_text|>", "<|content_model_end_sampling|>")

_MUSE_MESSAGES = Messages(
    start="<|start|>assistant",
    header_end="<|message|>",
    ends=("<|eom|>", "<|eot|>"),
    routes=(
        Route(Stage.REASONING, " to=self"),
        Route(Stage.CONTENT, " to=user", has_calls=False),
        # If the recipient of a message is neither `self` nor `user`, the recipient is a tool, and
        # the text of the message contains the tool call.
        Route(Stage.CONTENT, " to={word}", written=" to=functions"),
        Route(Stage.CONTENT, "{rest}", written=" to=user"),
    ),
    tools=ToolSection(
        (
            Call(
                TaggedArguments('<atem:parameter name="{key}">', "</atem:parameter>\n"),
                head='<atem:invoke name="{name}">\n',
                close="</atem:invoke>\n",
            ),
        ),
        open="<atem:function_calls>\n",
        close="</atem:function_calls>",
    ),
)

_PLAMO_ENDS = ("<|plamo:tag|>",)

REASONING = {
    "inkling": ReasoningEntry(
        Reasoning(
            "<|message_model|><|content_thinking|>",
            "<|end_message|>",
            also_open=("<|content_thinking|>",),
        ),
        _INKLING,
        Wrapper("<|message_model|><|content_text|>", "<|end_message|>"),
        ends=_INKLING_ENDS,
    ),
    "muse": ReasoningEntry(_MUSE_MESSAGES, _MUSE),
    "plamo3": ReasoningEntry(
        Reasoning("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        _PLAMO,
        ends=_PLAMO_ENDS,
    ),
}

TOOLS = {
    "inkling": ToolEntry(
        ToolSection(
            tuple(
                Call(
                    JsonObject(Keys("name", "args")),
                    open="<|message_model|>" if head else "<|content_invoke_tool_json|>",
                    head=head,
                    close="<|end_message|>",
                )
                for head in (
                    "{word}<|content_invoke_tool_json|>",
                    "<|content_invoke_tool_json|>",
                    "",
                )
            )
        ),
        _INKLING,
        ends=_INKLING_ENDS,
    ),
    "muse": ToolEntry(_MUSE_MESSAGES, _MUSE),
    "plamo3": ToolEntry(
        ToolSection(
            (
                Call(
                    JsonArguments(),
                    open="<|plamo:begin_tool_request:plamo|>",
                    head="<|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
                    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
                    close="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
                ),
            ),
            open="<|plamo:begin_tool_requests:plamo|>",
            close="<|plamo:end_tool_requests:plamo|>",
        ),
        _PLAMO,
        ends=_PLAMO_ENDS,
    ),
    "functionary_v3_2": ToolEntry(
        Messages(
            start=">>>",
            header_end="\n",
            routes=(Route(Stage.CONTENT, "all"), Route(Stage.CALLS, "{name}")),
        ),
        _FUNCTIONARY,
    ),
    "functionary_v3_1": ToolEntry(
        ToolSection((Call(JsonArguments(), head="<function={name}>", close="</function>"),)),
        _FUNCTIONARY31,
    ),
}
