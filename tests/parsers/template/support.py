"""Helpers of the template tests: small templates, and a renderer without any analysis."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from nereid_parsers import StreamParser, analyze_template, fold

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
FORMS = json.loads((TEMPLATES / "forms.json").read_text(encoding="utf-8"))
USER = "Please look into it."


def source(name):
    """Return the text of a small template."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def analysis_of(name):
    """Return the analysis of a small template. Each template is analysed once in a process."""
    return analyze_template(source(name))


def tool(name, /, **properties):
    """Return an OpenAI tool. `properties` maps the names of arguments to JSON types."""
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_Station", name="string", line="integer", open="boolean"),
    tool("save", text="string", tags="array", place="object", note=["string", "null"]),
    tool("list_all"),
]
CALLS = [
    ("get_Station", {"name": "Gare du Nord", "line": 4, "open": True}),
    ("save", {"text": 'a < b\n"quoted" & more', "tags": ["x", "y, z"]}),
    ("save", {"text": "12", "place": {"lat": 48.5, "name": "Zoë"}}),
    ("list_all", {}),
]


def _raise(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


@dataclass(frozen=True)
class Written:
    """The text that a model would generate for a message, and the prompt before the message."""

    prompt: str
    text: str


class Renderer:
    """Renders a template with plain jinja2."""

    def __init__(self, text):
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals.update(raise_exception=_raise)
        self._template = env.from_string(text)

    def render(self, messages, tools=None, prompt=False, **kwargs):
        """Return the text of the conversation."""
        return self._template.render(
            messages=messages, tools=tools, add_generation_prompt=prompt,
            bos_token="", eos_token="</s>", **kwargs,
        )  # fmt: skip

    def written(self, message, tools=None, **kwargs):
        """Return the prompt and the rendered message after the prompt.

        Return None if the rendered conversation does not start with the prompt.
        """
        user = [{"role": "user", "content": USER}]
        prompt = self.render(user, tools, prompt=True, **kwargs)
        whole = self.render([*user, message], tools, **kwargs)
        return Written(prompt, whole[len(prompt) :]) if whole.startswith(prompt) else None


def message_of(content="", reasoning="", calls=(), supports=None):
    """Return an assistant message in the form that the template expects.

    Args:
        content: the text of the message.
        reasoning: the reasoning of the message.
        calls: a pair for each tool call: the name and the arguments.
        supports: the result of the analysis that describes which forms of messages the template
            supports.
    """
    message = {"role": "assistant", "content": content}
    reasoning_fields = supports.reasoning if supports is not None else ()
    if reasoning and reasoning_fields == ("parts",):
        text_parts = [{"type": "text", "text": content}] if content else []
        message["content"] = [{"type": "thinking", "thinking": reasoning}, *text_parts]
    elif reasoning:
        message[reasoning_fields[0]] = reasoning
    for number, (name, arguments) in enumerate(calls):
        is_text = supports is not None and supports.arguments == "text"
        function = {"name": name, "arguments": json.dumps(arguments) if is_text else arguments}
        call = {"id": f"functions.{name}:{number}", "type": "function", "function": function}
        # Some templates read the name and the arguments from the call instead of its field
        # `function`. The message therefore contains them in both places.
        message.setdefault("tool_calls", []).append(call | function)
    return message


def stream_written(fmt, written, size, tools=TOOLS):
    """Parse a written text that arrives in pieces of `size` characters, and return the message."""
    parser = StreamParser(fmt, tools=tools, prompt=written.prompt)
    text = written.text
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    events = [event for piece in pieces for event in parser.feed(piece)]
    return fold([*events, *parser.finish()])


def calls_of(message):
    """Return a pair for each call of a parsed message: the name and the decoded arguments."""
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
