"""Sends the HTTP requests of the `nereid` command, with the API key in NEREID_API_KEY."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nereid_client.console import CliError, FailureError

Json = dict[str, Any]

DEFAULT_URL = "http://127.0.0.1:9000"
# Environment variables such as HTTP_PROXY can name a proxy. This module ignores these variables,
# because a proxy could not reach a server on this machine.
_OPENER_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_MAX_ERROR_CHARS = 200


def base_url(url: str) -> str:
    """Return the URL of a server, without "/v1" at the end.

    Example: "http://127.0.0.1:9000/v1/" returns "http://127.0.0.1:9000".

    Raises: CliError if the URL does not begin with http:// or https://.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise CliError(
            f"--url: the URL must begin with http:// or https://, but it is {url!r}. An example is "
            f"{DEFAULT_URL}."
        )
    return url.rstrip("/").removesuffix("/v1")


def send(url: str, body: Json | None = None) -> http.client.HTTPResponse:
    """Send a GET request, or a POST request if a body is given. Return the response.

    There is no time limit, because a model may need minutes for a response. A proxy in a variable
    such as HTTP_PROXY is not used, because the server is usually on this machine.

    Raises:
        CliError: the URL or the API key is invalid.
        FailureError: the connection fails, or the server answers with an error.
    """
    headers = {"Content-Type": "application/json", **_authorization()}
    data = None if body is None else json.dumps(body).encode()
    with _request_errors(url):
        response: http.client.HTTPResponse = _OPENER_WITHOUT_PROXY.open(
            urllib.request.Request(url, data, headers)  # type: ignore[arg-type]
        )
    return response


def _authorization() -> dict[str, bytes]:
    """Return the header with the API key in NEREID_API_KEY. Without a key, return {}.

    Raises: CliError if the key cannot be sent in a header.
    """
    key = os.environ.get("NEREID_API_KEY")
    if not key:
        return {}
    if not key.isprintable() or key != key.strip():
        raise CliError(
            "NEREID_API_KEY has a line end, another control character, or a space at the beginning "
            "or the end. Remove this character."
        )
    # `http.client` can encode only Latin-1. The frontend compares keys as UTF-8.
    return {"Authorization": f"Bearer {key}".encode()}


@contextmanager
def _request_errors(url: str) -> Iterator[None]:
    """Raise a CliError or a FailureError if a request to `url` fails in the `with` block."""
    try:
        yield
    except urllib.error.HTTPError as error:
        message = _error_message(url, error)
        if error.code == 401:  # the server's message names only headers
            message += " The `nereid` command sends the key in the variable NEREID_API_KEY."
        raise FailureError(message) from None
    except (ValueError, http.client.InvalidURL) as error:
        raise CliError(
            f"--url: {url} is not a valid URL ({error}). An example is {DEFAULT_URL}."
        ) from None
    except OSError as error:
        raise FailureError(
            f"Cannot connect to {url} ({error}). Check that `nereid serve` is running, or give its "
            "address with --url."
        ) from None
    except http.client.HTTPException as error:  # example: the address is a gRPC endpoint
        raise FailureError(
            f"The answer of {url} is not HTTP ({error!r}). Give the address of an OpenAI API with "
            "--url."
        ) from None


def _error_message(url: str, response: urllib.error.HTTPError) -> str:
    """Return the message in an error response. Close the response.

    Example: the body '{"error": {"message": "The queue is full."}}' returns "The queue is full.".
    For a body in another format, return the status and the beginning of the body.
    """
    with response, _connection_errors(url):
        text = response.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{url} answered with the status {response.code}: {text[:_MAX_ERROR_CHARS]}"


@contextmanager
def _connection_errors(url: str) -> Iterator[None]:
    """Raise a FailureError if the connection to `url` fails in the `with` block.

    A ValueError also counts as a failed connection, because a chunk that was cut off is not JSON.
    """
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _incomplete_response_error(url, str(error)) from None


def _incomplete_response_error(url: str, reason: str) -> FailureError:
    return FailureError(
        f"The connection to {url} ended before the response was complete ({reason}). Check that "
        "the server is still running, and repeat the request."
    )


def fetch_from_openai_api(url: str, body: Json | None = None, list_field: str = "data") -> Json:
    """Send a request to an OpenAI API, and return the JSON object in the response.

    Args:
        url: the URL of the request.
        body: the body of a POST request. None sends a GET request.
        list_field: a field of the object, which must contain a list. Otherwise, the server at the
            URL has no OpenAI API. In most responses of OpenAI's API, this field is "data".

    Raises: CliError if the URL is wrong. FailureError if the request fails, or if the response is
        not such an object.
    """
    with send(url, body) as response, _connection_errors(url):
        try:
            answer: Json = json.load(response)
        except ValueError as error:
            raise FailureError(f"{url} did not answer with JSON: {error}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get(list_field), list):
        raise FailureError(
            f"{url} answered without the list {list_field!r}, so it is not an OpenAI API. Give the "
            "address of an OpenAI API with --url."
        )
    return answer


def events_of(response: http.client.HTTPResponse) -> Iterator[Json]:
    """Yield the chunks in a stream of server-sent events.

    Raises: FailureError if a chunk contains an error, if the connection fails, or if the stream
        ends without "data: [DONE]".
    """
    url = response.url
    with _connection_errors(url):
        for line in response:
            if line.startswith(b"data: {"):
                event: Json = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise FailureError(event["error"]["message"])
                yield event
            elif line.startswith(b"data: [DONE]"):
                return
    # If the connection ends between two chunks, `http.client` reports no error.
    raise _incomplete_response_error(url, "the stream has no [DONE]")


def first_model(url: str) -> str:
    """Return the name of the first model in /v1/models.

    Raises: CliError if the server has no model.
    """
    models = fetch_from_openai_api(f"{url}/v1/models")["data"]
    if not models:
        raise FailureError(
            f"{url} serves no model. Load a model, or give the name of one with --model."
        )
    return str(models[0]["id"])
