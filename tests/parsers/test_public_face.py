"""Tests of the names that the package exports."""

import subprocess
import sys

import nereid_parsers
import pytest

FACE = [
    "Format",
    "StreamParser",
    "parse",
    "get_format",
    "format_names",
    "analyze_template",
    "TemplateAnalysis",
    "Message",
    "ToolCall",
    "ReasoningDelta",
    "ReasoningGate",
    "ContentDelta",
    "ToolCallStart",
    "ArgumentsDelta",
    "ToolCallEnd",
    "Event",
    "Policy",
    "LENIENT",
    "STRICT",
    "Stage",
    "fold",
    "FormatError",
    "UnknownFormatError",
    "ConstraintError",
    "TemplateError",
    "NereidParsersError",
]


def test_the_package_exports_exactly_these_names():
    assert sorted(nereid_parsers.__all__) == sorted(FACE)


def test_other_names_raise_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nereid_parsers.nothing


def test_parsing_imports_neither_templates_nor_anything_heavy():
    code = (
        "import sys, nereid_parsers as n; n.parse('x', format=n.get_format('hermes'));"
        "print(sorted({'jinja2', 'torch', 'transformers', 'xgrammar', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
