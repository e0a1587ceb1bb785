"""Chat templates: infer a model's output format from a template, and render templates safely.

`analyze_template` infers a Format from a template by comparing renderings.
`format_for_checkpoint` chooses the Format of a checkpoint from the files in its folder.
`RequestTemplate` renders the requests of a server.
"""

from nereid_parsers.template.analysis import analyze_template
from nereid_parsers.template.checkpoint import ChosenFormat, format_for_checkpoint
from nereid_parsers.template.checkpoint_files import read_checkpoint
from nereid_parsers.template.report import Supports, TemplateAnalysis
from nereid_parsers.template.request_template import ContinuationRefused, RequestTemplate
from nereid_parsers.template.response.response_template import format_of_response_template
from nereid_parsers.template.sandbox.compile_template import RenderRefused
from nereid_parsers.template.sandbox.limits import LimitError

__all__ = [
    "ChosenFormat",
    "ContinuationRefused",
    "LimitError",
    "RenderRefused",
    "RequestTemplate",
    "Supports",
    "TemplateAnalysis",
    "analyze_template",
    "format_for_checkpoint",
    "format_of_response_template",
    "read_checkpoint",
]
