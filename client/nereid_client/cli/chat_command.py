"""`nereid chat`: chat with a served model in the terminal."""

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from nereid_client.console import CliError, complain, say

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Json = dict[str, Any]


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
        default="http://127.0.0.1:9000",
        help="The URL of the OpenAI frontend. The default is %(default)s.",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="The name of the model. The default is the first served model.",
    )
    parser.add_argument("--system", metavar="TEXT", help="A system message.")
    parser.add_argument("--temperature", type=float, metavar="X", help="The sampling temperature.")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="The maximum number of tokens in a response."
    )
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help="Ask a reasoning model to answer without reasoning.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the user ends the program, or send stdin as one message."""
    url = args.url.rstrip("/").removesuffix("/v1")
    model = args.model or _first_model(url)
    fields: Json = {"model": model, "stream": True}
    for name in ("temperature", "max_tokens"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    if args.no_thinking:
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    opening = [{"role": "system", "content": args.system}] if args.system else []
    if not sys.stdin.isatty():
        return 0 if _send_message(url, fields, [*opening], sys.stdin.read().strip()) else 1
    say(f"Chatting with {model} at {url}. /new starts a new conversation, /quit ends the program.")
    return _converse(url, fields, opening)


def _converse(url: str, fields: Json, opening: list[Json]) -> int:
    """Read messages from the terminal and print the responses. Return the exit code."""
    messages = [*opening]
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            say()
            return 0
        if text == "/quit":
            return 0
        if text == "/new":
            messages = [*opening]
        elif text:
            _send_message(url, fields, messages, text)


def _send_message(url: str, fields: Json, messages: list[Json], text: str) -> bool:
    """Send a message and print the response.

    Mutates: messages, unless the request failed.

    Returns: whether the request succeeded.
    """
    question = {"role": "user", "content": text}
    body = {**fields, "messages": [*messages, question]}
    answer: list[str] = []
    try:
        with _open(f"{url}/v1/chat/completions", body) as response:
            _print_response(_events(response), answer.append)
    except KeyboardInterrupt:  # closing the connection aborts the request
        say(f"{_PLAIN} [stopped]")
    except CliError as error:
        complain(f"{error}")
        return False
    messages += [question, {"role": "assistant", "content": "".join(answer)}]
    return True


def _print_response(events: Iterator[Json], collect: Callable[[str], object]) -> None:
    """Print the response while it arrives, with reasoning in a dim colour.

    Args:
        events: the chunks of a stream.
        collect: is called with each piece of the content.

    Raises: CliError for an error in the stream.
    """
    is_dim = False
    for event in events:
        if "error" in event:
            raise CliError(event["error"]["message"])
        for choice in event["choices"]:
            delta = choice["delta"]
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                sys.stdout.write(f"\n[{function['name']}] " if "name" in function else "")
                sys.stdout.write(function.get("arguments") or "")
            reasoning, content = delta.get("reasoning") or "", delta.get("content") or ""
            if reasoning and not is_dim and sys.stdout.isatty():
                sys.stdout.write(_DIM)
                is_dim = True
            sys.stdout.write(reasoning)
            if content and is_dim:
                sys.stdout.write(f"{_PLAIN}\n")
                is_dim = False
            sys.stdout.write(content)
            collect(content)
            sys.stdout.flush()
    say(_PLAIN if is_dim else "")


def _events(response: http.client.HTTPResponse) -> Iterator[Json]:
    """Yield the chunks of a stream of server-sent events."""
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _first_model(url: str) -> str:
    """Return the name of the first model in /v1/models."""
    with _open(f"{url}/v1/models") as response:
        return str(json.load(response)["data"][0]["id"])


def _open(url: str, body: Json | None = None) -> http.client.HTTPResponse:
    """Send a GET, or a POST if there is a body, and return the response.

    Raises: CliError with the server's error message.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("NEREID_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        response: http.client.HTTPResponse = _DIRECT.open(
            urllib.request.Request(url, data, headers)
        )
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace")
        try:
            raise CliError(json.loads(text)["error"]["message"]) from None
        except (ValueError, KeyError, TypeError):
            raise CliError(f"{url} answered with the status {error.code}: {text[:200]}") from None
    except OSError as error:
        raise CliError(
            f"Cannot connect to {url} ({error}). Check that `nereid serve` is running, or give its "
            "address with --url."
        ) from None
    return response
