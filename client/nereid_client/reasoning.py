"""How much of the reasoning a client wants to see, and when."""

from dataclasses import dataclass, field

from nereid_client.deltas import Delta


@dataclass
class ReasoningView:
    """Shows each delta as its request wants it; one object a request.

    Attributes:
        include: false leaves reasoning out (vLLM's `include_reasoning`).
        stream: false gives a choice's reasoning in one piece, once it is over (SGLang's
            `stream_reasoning`).
    """

    include: bool = True
    stream: bool = True
    _held: dict[int, list[str]] = field(default_factory=dict)

    def show(self, delta: Delta) -> Delta:
        """The delta as its client sees it."""
        if self.include and self.stream:
            return delta
        shown = delta.copy()
        reasoning = shown.pop("reasoning", "")
        if not self.include:
            return shown
        held = self._held.setdefault(delta.get("index", 0), [])
        held.append(reasoning)
        if not shown.keys().isdisjoint(_BEHIND_REASONING) and (whole := "".join(held)):
            held.clear()
            shown["reasoning"] = whole
        return shown


_BEHIND_REASONING = ("content", "tool_calls", "finish_reason")
