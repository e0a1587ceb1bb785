"""gpt-oss: OpenAI's Harmony messages. The recipient precedes or follows the channel."""

from nereid_parsers.declarations import Messages, Route, Source, Stage
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry

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
        # A model sometimes addresses itself and then writes the header that it means.
        Route(Stage.CONTENT, "<|channel|>{word} to=assistant<|channel|>final{rest}"),
        Route(Stage.REASONING, "<|channel|>{word} to=assistant<|channel|>analysis{rest}"),
        Route(Stage.CALLS, "<|channel|>{word} to={name}{rest}"),
        Route(Stage.CALLS, " to={name}{rest}"),
        Route(Stage.REASONING, "<|channel|>analysis{rest}", written="<|channel|>analysis"),
        # A message to any other recipient is not for the user.
        Route(Stage.REASONING, "<|channel|>{word} to={word}{rest}"),
        Route(Stage.REASONING, " to={word}{rest}"),
        Route(Stage.CONTENT, "<|channel|>final{rest}", written="<|channel|>final"),
        Route(Stage.CONTENT, "<|channel|>{word}{rest}", written="<|channel|>commentary"),
    ),
)

REASONING = {"gpt_oss": ReasoningEntry(_MESSAGES, _HARMONY)}
TOOLS = {"gpt_oss": ToolEntry(_MESSAGES, _HARMONY)}
