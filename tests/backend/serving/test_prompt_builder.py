import pytest
from nereid_backend import RequestError
from nereid_backend.serving.tokenizer.prompt_builder import read_flag, read_tools

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]


def allowed(*names, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def offered(**fields):
    found = read_tools({"tools": TOOLS, **fields})
    return found and [tool["function"]["name"] for tool in found]


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function"}])
def test_all_tools_are_offered(choice):
    assert offered(tool_choice=choice) == ["f", "g", "h"]


def test_with_none_no_tools_are_offered():
    assert offered(tool_choice="none") is None


def test_only_allowed_tools_are_offered():
    assert offered(tool_choice=allowed("h", "f")) == ["f", "h"]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            allowed("x"),
            'tool_choice: allowed_tools has the function "x", but tools has only f, g, h',
        ),
        (
            {"type": "allowed_tools"},
            "allowed_tools.tools must be a list of functions, but the request has no value",
        ),
    ],
)
def test_what_allows_no_known_tool_is_refused(choice, said):
    with pytest.raises(RequestError, match=said):
        offered(tool_choice=choice)


@pytest.mark.parametrize("value", [True, "true", " True"])
def test_a_flag_may_come_as_text(value):
    assert read_flag({"x": value}, "x", default=False) is True


def test_a_flag_that_is_none_is_refused():
    with pytest.raises(
        RequestError, match="x: the value must be true or false, but the request has 1"
    ):
        read_flag({"x": 1}, "x", default=False)
