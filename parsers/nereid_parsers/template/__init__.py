"""Chat templates: which format one implies, found by comparing renderings.

`analyze_template` infers a Format from a template; `format_for_checkpoint` finds the one of a
checkpoint, whatever says it.
"""

from nereid_parsers.template.analysis import Supports, TemplateAnalysis, analyze_template
from nereid_parsers.template.checkpoint import ChosenFormat, format_for_checkpoint, read_checkpoint
from nereid_parsers.template.response_template import format_of_response_template

__all__ = [
    "ChosenFormat",
    "Supports",
    "TemplateAnalysis",
    "analyze_template",
    "format_for_checkpoint",
    "format_of_response_template",
    "read_checkpoint",
]
