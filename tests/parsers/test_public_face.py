"""The package's public face."""

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


def test_the_face_is_exactly_this():
    assert sorted(nereid_parsers.__all__) == sorted(FACE)


def test_what_is_no_part_of_the_face_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nereid_parsers.nothing


def test_parsing_imports_neither_templates_nor_anything_heavy():
    code = (
        "import sys, nereid_parsers as n; n.parse('x', format=n.get_format('hermes'));"
        "print(sorted({'jinja2', 'torch', 'transformers', 'xgrammar', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
