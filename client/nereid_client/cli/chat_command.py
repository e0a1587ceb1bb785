"""`nereid chat`: chat with a served model in the terminal."""

import argparse
import base64
import contextlib
import importlib
import mimetypes
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nereid_client.cli.api_client import (
    DEFAULT_URL,
    Json,
    base_url,
    events_of,
    fetch_from_openai_api,
    first_model,
    send,
)
from nereid_client.cli.output import print_json, read_stdin, write_model_text
from nereid_client.console import CliError, complain, say

# Escape sequences that change the style in which a terminal prints the following text.
_DIM_STYLE, _NORMAL_STYLE = "\x1b[2m", "\x1b[0m"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand `chat`."""
    parser = commands.add_parser(
        "chat",
        help="chat with a served model in this terminal",
        description="Chat with a served model. /new starts a new conversation, and /quit or Ctrl-D "
        "ends the program. If the standard input is not a terminal, it is sent as one message. The "
        "API key is read from NEREID_API_KEY.",
    )
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="The URL of the OpenAI frontend. The default is %(default)s.",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="The name of the model. The default is the first served model.",
    )
    parser.add_argument("--system", metavar="TEXT", help="A system message.")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="An image file to send with the first message of each conversation. The flag can be "
        "repeated.",
    )
    parser.add_argument("--temperature", type=float, metavar="X", help="The sampling temperature.")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="The maximum number of tokens in a response."
    )
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help="Ask a reasoning model to answer without reasoning.",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print the whole response as JSON. The message must come from a file or a pipe.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat in the terminal until the user quits. Return the exit code.

    If stdin is not a terminal, send its text as one message and print the response. With --json,
    print the whole response as JSON.
    """
    url = base_url(args.url)
    model = args.model or first_model(url)
    fields = _request_fields(args, model)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    images = [_image_part(file) for file in args.image]
    if args.json:
        # `read_stdin` raises a CliError if stdin is a terminal or has no text.
        question = _user_message(read_stdin(), images)
        body = {**fields, "messages": [*opening, question]}
        print_json(fetch_from_openai_api(f"{url}/v1/chat/completions", body, "choices"))
        return 0
    if not sys.stdin.isatty():
        # A message with images needs no text.
        text = sys.stdin.read().strip() if images else read_stdin()
        question = _user_message(text, images)
        has_succeeded = _send_message(url, fields, [*opening], question)
        return 0 if has_succeeded else 1
    say(f"Chatting with {model} at {url}. /new starts a new conversation, /quit ends the program.")
    _converse(url, fields, opening, images)
    return 0


def _request_fields(args: argparse.Namespace, model: str) -> Json:
    """Convert the flags to the fields of a chat completion request, except for `messages`."""
    fields: Json = {"model": model, "stream": not args.json}
    if args.temperature is not None:
        fields["temperature"] = args.temperature
    if args.max_tokens is not None:
        fields["max_tokens"] = args.max_tokens
    if args.no_thinking:
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    return fields


def _image_part(file: Path) -> Json:
    """Return a content part that contains an image file as a data URL.

    Raises: CliError if the file cannot be read, or if its name has no extension of an image format.
    """
    # If `strict` is true, old versions of Python know image/webp only on systems with a file of
    # media types, such as /etc/mime.types.
    media_type = mimetypes.guess_type(file, strict=False)[0] or ""
    if not media_type.startswith("image/"):
        raise CliError(f"--image: {file} does not end with .png, .jpg, .webp, .gif or .bmp")
    try:
        content = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        raise CliError(f"--image: {file} cannot be read ({error.strerror})") from None
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{content}"}}


def _user_message(text: str, images: Sequence[Json]) -> Json:
    """Return a user message that contains the content parts of images, followed by a text."""
    content = [*images, {"type": "text", "text": text}] if images else text
    return {"role": "user", "content": content}


def _converse(url: str, fields: Json, opening: list[Json], images: Sequence[Json]) -> None:
    """Chat with the user: read messages from the terminal, and print the model's responses.

    The chat lasts until the user quits.
    """
    # With the module readline, the arrow keys edit a message and recall earlier messages. Some
    # builds of Python do not have the module.
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")
    messages = [*opening]
    while (text := _read_message()) != "/quit":
        if text == "/new":
            messages = [*opening]
        elif text:
            is_first = len(messages) == len(opening)
            question = _user_message(text, images if is_first else ())
            # This call appends the question and the answer to `messages`.
            _send_message(url, fields, messages, question)


def _read_message() -> str:
    """Read a line from the terminal. For Ctrl-D and Ctrl-C, return "/quit"."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        say()
        return "/quit"


def _send_message(url: str, fields: Json, messages: list[Json], question: Json) -> bool:
    """Send a user message and print the response. The user can stop the response with Ctrl-C.

    Mutates: messages. The message and the response are appended, unless the request failed.

    Returns: False if the request failed. A response that the user stopped counts as a success.
    """
    body = {**fields, "messages": [*messages, question]}
    answer: list[str] = []  # the pieces of the content that have been printed
    try:
        with send(f"{url}/v1/chat/completions", body) as response:
            _print_response(events_of(response), answer)
    except KeyboardInterrupt:  # closing the connection aborts the request
        say(" [stopped]")
    except CliError as error:
        complain(f"{error}")
        return False
    messages += [question, {"role": "assistant", "content": "".join(answer)}]
    return True


def _print_response(events: Iterator[Json], answer: list[str]) -> None:
    """Print the tool calls, the reasoning and the content of a response while they arrive.

    Mutates: answer. Each piece of the content is appended after it is printed, so that `answer` is
        complete even if the user stops the response.
    """
    writer = _StyledWriter()
    deltas = (choice["delta"] for event in events for choice in event["choices"])
    try:
        for delta in deltas:
            _print_call_pieces(delta.get("tool_calls") or ())
            if reasoning := delta.get("reasoning"):
                writer.write_reasoning(reasoning)
            if content := delta.get("content"):
                writer.write_content(content)
                answer.append(content)
            sys.stdout.flush()
    finally:
        writer.restore_style()
    say()


class _StyledWriter:
    """Writes the reasoning and the content of a response. In a terminal, reasoning is dim."""

    def __init__(self) -> None:
        is_terminal = sys.stdout.isatty()
        self._dim, self._normal = (_DIM_STYLE, _NORMAL_STYLE) if is_terminal else ("", "")
        self._is_reasoning = False  # whether the last piece was reasoning

    def write_reasoning(self, text: str) -> None:
        if not self._is_reasoning:
            sys.stdout.write(self._dim)
            self._is_reasoning = True
        write_model_text(text)

    def write_content(self, text: str) -> None:
        """Write a piece of the content. The content starts on a new line after the reasoning."""
        if self._is_reasoning:
            self.restore_style()
            sys.stdout.write("\n")
        write_model_text(text)

    def restore_style(self) -> None:
        """Write following text in the normal style."""
        if self._is_reasoning:
            sys.stdout.write(self._normal)
            self._is_reasoning = False


def _print_call_pieces(pieces: Sequence[Json]) -> None:
    """Print pieces of tool calls as they arrive. Each new call starts on a new line.

    Example: the name "f" and the arguments "{}" are printed as "[f] {}".
    """
    for piece in pieces:
        function = piece["function"]
        if "name" in function:
            write_model_text(f"\n[{function['name']}] ")
        write_model_text(function.get("arguments") or "")
