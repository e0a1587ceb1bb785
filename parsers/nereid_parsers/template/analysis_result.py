"""The data that the analysis of a chat template returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereid_parsers.format import Format
from nereid_parsers.template.difference import Comparison
from nereid_parsers.template.proof import Proof


@dataclass(frozen=True, slots=True)
class Supports:
    """The parts of a conversation that a template can render.

    Attributes:
        content: Whether the template renders content.
        reasoning: The message fields from which reasoning is rendered. ("parts",) or ("blocks",) if
            reasoning must be a part of the content.
        switches: The text that each thinking switch adds after the header in the generation prompt.
        calls: The form of tool calls, such as "JSON". "none" if tool calls are not rendered.
        parallel_calls: Whether one message can have several tool calls.
        content_with_calls: Whether one message can have both content and tool calls.
        arguments: "object", or "text" if the template expects arguments as a JSON string.
        ids: "plain", or "numbered" if the template renders the id of a tool call instead of its
            name.
    """

    content: bool = False
    reasoning: tuple[str, ...] = ()
    switches: dict[str, str] = field(default_factory=dict)
    calls: str = "none"
    parallel_calls: bool = False
    content_with_calls: bool = False
    arguments: str = "object"
    ids: str = "plain"


@dataclass(frozen=True, slots=True)
class AnalysisResult:
    """The format that a chat template implies, and the comparisons from which it was inferred.

    Attributes:
        format: The inferred format. It is plain content if nothing could be inferred.
        comparisons: The comparisons of renderings, in order. Each comparison contains its finding.
        supports: The parts of a conversation that the template can render.
        undecided: Sentences that describe what could not be inferred, and why.
        proofs: Renderings that were parsed with the format, and the parts that differed.
    """

    format: Format
    comparisons: tuple[Comparison, ...] = ()
    supports: Supports = Supports()
    undecided: tuple[str, ...] = ()
    proofs: tuple[Proof, ...] = ()
