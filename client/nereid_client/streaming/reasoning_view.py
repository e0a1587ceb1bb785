"""Send reasoning in pieces while it is generated, or as a whole when it is complete."""

from dataclasses import dataclass, field

from nereid_client.streaming.deltas import Delta

_END_OF_REASONING = ("content", "tool_calls", "finish_reason")


@dataclass
class ReasoningView:
    """Sends the reasoning of a stream in pieces, or as a whole when the reasoning is complete.

    Attributes:
        streams_reasoning: whether reasoning is sent while it is generated. If false, the reasoning
            of a choice is collected, and is sent with the first delta after the reasoning. The
            request field is `stream_reasoning`, as in SGLang.
    """

    streams_reasoning: bool = True
    # Maps the index of a choice to the pieces of its reasoning that have not been sent.
    _collected: dict[int, list[str]] = field(default_factory=dict)

    def apply(self, delta: Delta) -> Delta:
        """Return the delta that the client receives instead of `delta`.

        Example: if reasoning is sent as a whole, the deltas {"reasoning": "a"}, {"reasoning": "b"},
        {"content": "c"} become {}, {}, {"content": "c", "reasoning": "ab"}.
        """
        if self.streams_reasoning:
            return delta
        index = delta.get("index", 0)
        changed = delta.copy()
        new_reasoning = changed.pop("reasoning", "")
        self._collected.setdefault(index, []).append(new_reasoning)
        has_reasoning_ended = any(key in changed for key in _END_OF_REASONING)
        if has_reasoning_ended:
            whole_reasoning = "".join(self._collected.pop(index))
            if whole_reasoning:
                changed["reasoning"] = whole_reasoning
        return changed
