"""Chat templates: which format one implies, found by comparing renderings."""

from nereid_parsers.template.analysis import Supports, TemplateAnalysis, analyze_template

__all__ = ["Supports", "TemplateAnalysis", "analyze_template"]
