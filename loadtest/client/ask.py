"""One request of a load test, for any endpoint of the server."""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

Json = dict[str, Any]
Endpoint = Literal["openai", "triton", "grpc"]
_STREAMING_FIELDS = {"stream", "stream_options"}


@dataclass(frozen=True)
class Ask:
    """One request, and the behaviour of the client that sends it.

    Attributes:
        endpoint: the OpenAI API, or the HTTP or gRPC endpoint of the Triton server.
        path: the path of the URL. For gRPC, the name of the model.
        body: the JSON body as a dictionary, or a string that is sent unchanged. For gRPC, the text
            inputs by name.
        expected: the expected answer if it consists of numbered tokens; None if the answer is not
            known.
        refused_with: the HTTP status with which the server must reject the request, or None.
        cancel_after_s: the client cancels the request after this time, or never if None.
        cancel_after_events: the client cancels the request after this number of events of the
            stream, or never if None. A stream that has a finish reason is not cancelled.
        pause_s: the client waits for this time after each chunk that it reads.
        kind: the name of the request in a report.
    """

    endpoint: Endpoint
    path: str
    body: Json | str
    expected: Any = None
    refused_with: int | None = None
    cancel_after_s: float | None = None
    cancel_after_events: int | None = None
    pause_s: float = 0.0
    kind: str = ""

    @property
    def is_stream(self) -> bool:
        """Whether the answer is streamed."""
        if self.endpoint != "openai":
            return True
        return isinstance(self.body, dict) and bool(self.body.get("stream"))

    @property
    def key(self) -> str:
        """A text that is equal for two requests that must have the same answer.

        The fields for streaming are left out, because they do not change the answer.
        """
        body = self.body
        if isinstance(body, dict):
            body = {name: body[name] for name in body.keys() - _STREAMING_FIELDS}
        return f"{self.endpoint} {self.path} {json.dumps(body, sort_keys=True)}"

    def with_fields(self, fields: Json) -> "Ask":
        """Return a copy of this request with further fields in its JSON body."""
        assert isinstance(self.body, dict)
        return replace(self, body=self.body | fields)

    def cancelled(self, after_s: float) -> "Ask":
        """Return a copy of this request that the client cancels after `after_s` seconds."""
        return replace(self, cancel_after_s=after_s)

    def read_slowly(self, pause_s: float) -> "Ask":
        """Return a copy of this request whose client waits `pause_s` seconds after each chunk."""
        return replace(self, pause_s=pause_s)


def generate_stream(prompt: str, fields: Json, kind: str = "generate_stream") -> Ask:
    """Return a request for a streamed completion at the HTTP endpoint of the Triton server."""
    body = {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(fields)}
    return Ask("triton", "/v2/models/llm/generate_stream", body, kind=kind)


def grpc_stream(prompt: str, fields: Json, kind: str = "gRPC stream") -> Ask:
    """Return a request for a streamed completion at the gRPC endpoint; see `generate_stream`."""
    inputs = {"text_input": prompt, "sampling_parameters": json.dumps(fields)}
    return Ask("grpc", "llm", inputs, kind=kind)
