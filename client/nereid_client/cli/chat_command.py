"""`nereid chat`: talk to a served model in the terminal."""

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
    """Add `chat` to the command line."""
    parser = commands.add_parser(
        "chat",
        help="talk to a served model in this terminal",
        description="Talk to a model over the OpenAI API. An empty line does nothing, /new starts "
        "over, /quit or Ctrl-D ends. Without a terminal, stdin is one message.",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:9000", help="the server (default: %(default)s)"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the first one that is served")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--temperature", type=float, metavar="X")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument(
        "--no-thinking", action="store_true", help="ask a reasoning model to answer at once"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Converse until the user has enough."""
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
        return 0 if _turn(url, fields, [*opening], sys.stdin.read().strip()) else 1
    say(f"{model} at {url}; /new starts over, /quit ends")
    return _converse(url, fields, opening)


def _converse(url: str, fields: Json, opening: list[Json]) -> int:
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
            _turn(url, fields, messages, text)


def _turn(url: str, fields: Json, messages: list[Json], text: str) -> bool:
    """One question and its answer. Mutates: messages, only when there was an answer."""
    question = {"role": "user", "content": text}
    body = {**fields, "messages": [*messages, question]}
    answer: list[str] = []
    try:
        with _open(f"{url}/v1/chat/completions", body) as response:
            _show(_events(response), answer.append)
    except KeyboardInterrupt:  # closing the connection has aborted the request
        say(f"{_PLAIN} [stopped]")
    except CliError as error:
        complain(f"{error}")
        return False
    messages += [question, {"role": "assistant", "content": "".join(answer)}]
    return True


def _show(events: Iterator[Json], keep: Callable[[str], object]) -> None:
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
            keep(content)
            sys.stdout.flush()
    say(_PLAIN if is_dim else "")


def _events(response: http.client.HTTPResponse) -> Iterator[Json]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _first_model(url: str) -> str:
    with _open(f"{url}/v1/models") as response:
        return str(json.load(response)["data"][0]["id"])


def _open(url: str, body: Json | None = None) -> http.client.HTTPResponse:
    """The response to a GET, or to a POST of `body`.

    Raises: CliError with the server's own words.
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
            raise CliError(f"{url} answered {error.code}: {text[:200]}") from None
    except OSError as error:
        raise CliError(f"{url} can't be reached ({error}); is `nereid serve` running?") from None
    return response
