"""Parses and constrains the text that language models generate in a declared chat format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nereid_parsers.errors import (
    ConstraintError,
    FormatError,
    NereidParsersError,
    TemplateError,
    UnknownFormatError,
)
from nereid_parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallEnd,
    ToolCallStart,
    fold,
)
from nereid_parsers.format import LENIENT, STRICT, Format, Policy, ReasoningGate, Stage
from nereid_parsers.formats.registry import format_names, get_format
from nereid_parsers.stream.parser import StreamParser, parse

if TYPE_CHECKING:
    from nereid_parsers.template import TemplateAnalysis, analyze_template

__all__ = [
    "LENIENT",
    "STRICT",
    "ArgumentsDelta",
    "ConstraintError",
    "ContentDelta",
    "Event",
    "Format",
    "FormatError",
    "Message",
    "NereidParsersError",
    "Policy",
    "ReasoningDelta",
    "ReasoningGate",
    "Stage",
    "StreamParser",
    "TemplateAnalysis",
    "TemplateError",
    "ToolCall",
    "ToolCallEnd",
    "ToolCallStart",
    "UnknownFormatError",
    "analyze_template",
    "fold",
    "format_names",
    "get_format",
    "parse",
]

# Only the code of these names needs jinja2. The names are imported when a program uses them, so
# that the parsers work without jinja2.
_LAZY_NAMES = {"analyze_template", "TemplateAnalysis"}


def __getattr__(name: str) -> Any:  # noqa: ANN401  # Python defines this signature
    """Import a name in `_LAZY_NAMES` when a program uses this name for the first time."""
    if name in _LAZY_NAMES:
        from nereid_parsers import template

        return getattr(template, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
