"""Convert the tool calls in deltas to the format of chat completions.

The model calls a custom tool as a function with the parameter `input`. The call is converted to a
call of the custom tool.
"""

from collections.abc import Container, Iterable

from nereid_client.streaming.completion_frame import Json
from nereid_client.streaming.custom_tool_input import InputDecoder, decode_input
from nereid_client.streaming.deltas import ToolCallPiece


class ToolCallConverter:
    """Converts pieces of tool calls to the format of chunks. All calls belong to one choice."""

    def __init__(self, custom_tools: Container[str]) -> None:
        self._custom_tools = custom_tools
        # Maps the index of each custom tool call to the object that decodes the input of the call.
        self._decoders: dict[int, InputDecoder] = {}

    def convert(self, pieces: Iterable[ToolCallPiece]) -> list[Json]:
        """Return the pieces in the format of chunks.

        A piece of a custom tool's call is left out if it contains neither the name of the tool nor
        new text of the input, such as the arguments `{"inp`.

        Examples: {"index": 0, "arguments": "{"} returns {"index": 0, "function": {"arguments":
        "{"}}. If call 0 is a call of a custom tool, the arguments `{"input": "ls` return
        {"index": 0, "custom": {"input": "ls"}}.
        """
        converted = []
        for piece in pieces:
            index = piece["index"]
            if piece.get("name") in self._custom_tools:
                self._decoders.setdefault(index, InputDecoder())
            if index not in self._decoders:
                converted.append(_function_piece(piece))
                continue
            text = self._decoders[index].add(piece.get("arguments", ""))
            if text or "name" in piece:
                converted.append(_custom_piece(piece, text))
        return converted

    def finish(self) -> list[Json]:
        """Return pieces with the rest of each input. Call this method after the last delta."""
        rests = {index: decoder.finish() for index, decoder in self._decoders.items()}
        return [_custom_piece({"index": index}, rest) for index, rest in rests.items() if rest]


def whole_call(call: ToolCallPiece, custom_tools: Container[str]) -> Json:
    """Return a whole tool call in the format of chat completions.

    Example: {"id": "a", "name": "f", "arguments": "{}"} returns {"id": "a", "type": "function",
    "function": {"name": "f", "arguments": "{}"}}.

    Args:
        call: all pieces of the call, merged to one piece.
        custom_tools: the names of the custom tools.
    """
    name, arguments = call.get("name", ""), call.get("arguments", "")
    if name in custom_tools:
        custom = {"name": name, "input": decode_input(arguments)}
        return {"id": call.get("id", ""), "type": "custom", "custom": custom}
    function = {"name": name, "arguments": arguments}
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _function_piece(piece: ToolCallPiece) -> Json:
    """Convert a piece of a function call to the format of a chunk."""
    function = _named(piece, {"arguments": piece.get("arguments", "")})
    return _identified(piece, "function", function)


def _custom_piece(piece: ToolCallPiece, text: str) -> Json:
    """Convert a piece of a custom tool's call to the format of a chunk.

    OpenAI's library for Python declares no type for such a piece. This format is the one of a whole
    call, so that the library merges the pieces to a whole call.
    """
    return _identified(piece, "custom", _named(piece, {"input": text}))


def _named(piece: ToolCallPiece, fields: Json) -> Json:
    """Add the tool's name to `fields` if `piece` is the first piece of its call."""
    return {"name": piece["name"], **fields} if "name" in piece else fields


def _identified(piece: ToolCallPiece, kind: str, fields: Json) -> Json:
    """Return a piece with the index of its call. The first piece also has the id and the type."""
    call: Json = {"index": piece["index"], kind: fields}
    if "id" in piece:
        call |= {"id": piece["id"], "type": kind}
    return call
