"""When a client wants to see the reasoning: as it comes, or in one piece once it is over."""

from dataclasses import dataclass, field

from nereid_client.streaming.deltas import Delta

_BEHIND_REASONING = ("content", "tool_calls", "finish_reason")


@dataclass
class ReasoningView:
    """Shows each delta of a stream as its request wants it; one object a request.

    Attributes:
        as_it_comes: false gives a choice's reasoning in one piece, with what comes behind it
            (SGLang's `stream_reasoning`).
    """

    as_it_comes: bool = True
    _held: dict[int, list[str]] = field(default_factory=dict)

    def show(self, delta: Delta) -> Delta:
        """The delta as its client sees it."""
        if self.as_it_comes:
            return delta
        shown = delta.copy()
        held = self._held.setdefault(delta.get("index", 0), [])
        held.append(shown.pop("reasoning", ""))
        if not shown.keys().isdisjoint(_BEHIND_REASONING) and (whole := "".join(held)):
            held.clear()
            shown["reasoning"] = whole
        return shown
