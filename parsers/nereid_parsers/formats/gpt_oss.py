"""Describes the Harmony messages that gpt-oss writes, and similar messages of other models."""

from nereid_parsers.declarations import Messages, Route, Source, Stage
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import TaggedArguments

_HARMONY = Source(
    "OpenAI Harmony response format (cookbook.openai.com/articles/openai-harmony) and the chat "
    "template of openai/gpt-oss-120b",
    "2025-08",
)

_MESSAGES = Messages(
    start="<|start|>assistant",
    header_end="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    call_end="<|call|>",
    # In a header, the recipient of the message (`to=..`) either precedes or follows the channel
    # (`<|channel|>..`).
    routes=(
        Route(
            Stage.CALLS,
            "<|channel|>{word} to=functions.{name}{rest}",
            written="<|channel|>commentary to=functions.{name} <|constrain|>json",
        ),
        Route(
            Stage.CALLS,
            " to=functions.{name}{rest}",
            written=" to=functions.{name}<|channel|>commentary json",
        ),
        # A model sometimes addresses a message to itself with `to=assistant`. In this case, the
        # channel after `to=assistant` shows whether the message is reasoning or content.
        Route(Stage.CONTENT, "<|channel|>{word} to=assistant<|channel|>final{rest}"),
        Route(Stage.REASONING, "<|channel|>{word} to=assistant<|channel|>analysis{rest}"),
        Route(Stage.CALLS, "<|channel|>{word} to={name}{rest}"),
        Route(Stage.CALLS, " to={name}{rest}"),
        Route(Stage.REASONING, "<|channel|>analysis{rest}", written="<|channel|>analysis"),
        # A message with any other recipient is not meant for the user, so its text is treated as
        # reasoning.
        Route(Stage.REASONING, "<|channel|>{word} to={word}{rest}"),
        Route(Stage.REASONING, " to={word}{rest}"),
        Route(Stage.CONTENT, "<|channel|>final{rest}", written="<|channel|>final"),
        Route(Stage.CONTENT, "<|channel|>{word}{rest}", written="<|channel|>commentary"),
    ),
)

_BEAM = Source("beam parsers of vLLM 0.33.0", "2026-11")

_BEAM_MESSAGES = Messages(
    start="<|start|>assistant",
    header_end="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    body=TaggedArguments('<rfl:parameter name="{key}">\n', "\n</rfl:parameter>"),
    routes=(
        Route(Stage.CALLS, " to={name}<|channel|>analysis <|constrain|>xml"),
        Route(Stage.REASONING, "<|channel|>analysis"),
        Route(Stage.CONTENT, "<|channel|>final"),
    ),
)

REASONING = {
    "beam": ReasoningEntry(_BEAM_MESSAGES, _BEAM),
    "gpt_oss": ReasoningEntry(_MESSAGES, _HARMONY),
}
TOOLS = {
    "beam": ToolEntry(_BEAM_MESSAGES, _BEAM),
    "gpt_oss": ToolEntry(_MESSAGES, _HARMONY),
}
