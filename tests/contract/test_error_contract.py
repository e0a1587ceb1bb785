"""Tests that errors of the HTTP API keep their status, `type`, `code` and `param`.

Each case sends one wrong request to the frontend, which uses the fake backends of `tests/fakes`.
The test compares these four values of the answer with `data/errors.json`, because programs depend
on them. The test ignores the error's message, because messages may be reworded at any time.

The following command writes a new `data/errors.json`. Run the command only after an intended change
of these values, and review the difference:

    PYTHONPATH=tests python tests/contract/test_error_contract.py
"""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from nereid_client.app import create_app
from nereid_client.settings import Settings

pytestmark = pytest.mark.anyio

DATA = Path(__file__).parent / "data" / "errors.json"

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
KEY = {"Authorization": "Bearer s3cret"}


def chat(**fields):
    """Return a case that sends a chat completion request with the given fields."""
    return {"path": CHAT, "json": {"messages": HELLO, **fields}}


def text(**fields):
    """Return a case that sends a text completion request with the given fields."""
    return {"path": TEXT, "json": {"prompt": "a", **fields}}


def respond(**fields):
    """Return a case that sends a request of the Responses API with the given fields."""
    return {"path": RESPONSES, "json": {"input": "hello", **fields}}


def post(path, /, **fields):
    """Return a case that sends a JSON object with the given fields to `path` with POST."""
    return {"path": path, "json": fields}


def get(path, **more):
    """Return a case that sends a GET request."""
    return {"method": "GET", "path": path, **more}


def raw(content, path=CHAT, **more):
    """Return a case that sends `content`, which is text or bytes, with POST."""
    return {"path": path, "content": content, **more}


def say(content, **fields):
    """Return a case that sends a chat completion request whose only message is `content`."""
    return chat(messages=[{"role": "user", "content": content}], **fields)


CASES = {
    # Bodies that are not a JSON object.
    "chat: no body": raw(""),
    "chat: JSON that is cut off": raw('{"messages": ['),
    "chat: a list": raw("[1]"),
    "chat: a string": raw('"hello"'),
    "chat: NaN": raw('{"temperature": NaN}'),
    "chat: a number that is too large": raw('{"temperature": 1e999}'),
    "chat: an integer with too many digits": raw('{"seed": ' + "9" * 5000 + "}"),
    "chat: nesting that is too deep": raw('{"messages": ' + "[" * 100_000),
    "chat: bytes that are not UTF-8": raw(b'{"messages": "\xff"}'),
    "chat: half a surrogate pair": raw('{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "completions: half a surrogate pair": raw('{"prompt": "a\\ud800"}', TEXT),
    "completions: no body": raw("", TEXT),
    "responses: no body": raw("", RESPONSES),
    "embeddings: no body": raw("", EMBEDDINGS),
    "rerank: no body": raw("", "/v1/rerank"),
    "tokenize: no body": raw("", "/tokenize"),
    # Chat completions.
    "chat: no messages": post(CHAT, model="echo"),
    "chat: an empty list of messages": chat(messages=[]),
    "chat: messages is a string": chat(messages="hello"),
    "chat: a message is a string": chat(messages=["hello"]),
    "chat: a message without a role": chat(messages=[{"content": "hello"}]),
    "chat: an empty role": chat(messages=[{"role": "", "content": "hello"}]),
    "chat: content is a number": chat(messages=[{"role": "user", "content": 3}]),
    "chat: a user message without content": chat(messages=[{"role": "user"}]),
    "chat: a system message whose content is null": chat(
        messages=[{"role": "system", "content": None}, *HELLO]
    ),
    "chat: an unknown model": chat(model="gpt-9"),
    "chat: model is a number": chat(model=3),
    "chat: temperature is too high": chat(temperature=2.5),
    "chat: temperature is negative": chat(temperature=-1),
    "chat: temperature is a string": chat(temperature="hot"),
    "chat: top_p is 0": chat(top_p=0),
    "chat: top_p is over 1": chat(top_p=1.5),
    "chat: top_k is -2": chat(top_k=-2),
    "chat: min_p is over 1": chat(min_p=2),
    "chat: n is 0": chat(n=0),
    "chat: n is too large": chat(n=65),
    "chat: max_tokens is 0": chat(max_tokens=0),
    "chat: max_tokens is a string": chat(max_tokens="many"),
    "chat: max_tokens is over the backend's limit": chat(max_tokens=2_000_000),
    "chat: max_completion_tokens is a float": chat(max_completion_tokens=1.5),
    "chat: presence_penalty is too high": chat(presence_penalty=3),
    "chat: repetition_penalty is 0": chat(repetition_penalty=0),
    "chat: stop is a number": chat(stop=3),
    "chat: stop holds a number": chat(stop=["a", 3]),
    "chat: seed is too large": chat(seed=2**63),
    "chat: a key of logit_bias is no token id": chat(logit_bias={"a": 1}),
    "chat: a bias is too high": chat(logit_bias={"17": 101}),
    "chat: a bias is a string": chat(logit_bias={"17": "high"}),
    "chat: top_logprobs without logprobs": chat(top_logprobs=3),
    "chat: top_logprobs is too high": chat(logprobs=True, top_logprobs=21),
    "chat: logprobs is a number": chat(logprobs=3),
    "chat: prompt_logprobs in a stream": chat(prompt_logprobs=1, stream=True),
    "chat: stream_options without a stream": chat(stream_options={"include_usage": True}),
    "chat: stream_options is a string": chat(stream=True, stream_options="usage"),
    "chat: include_usage is a string": chat(stream=True, stream_options={"include_usage": "yes"}),
    "chat: an unknown response_format": chat(response_format={"type": "xml"}),
    "chat: response_format is a string": chat(response_format="json"),
    "chat: a json_schema without a schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a"}}
    ),
    "chat: a json_object whose schema is a number": chat(
        response_format={"type": "json_object", "schema": 3}
    ),
    "chat: tool_choice without tools": chat(tool_choice="required"),
    "chat: a tool_choice of another form": chat(tools=[TOOL], tool_choice="some"),
    "chat: a tool_choice that is not among the tools": chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}
    ),
    "chat: tools is a string": chat(tools="f"),
    "chat: request_id holds a space": chat(request_id="two words"),
    "chat: a modality that is not offered": chat(modalities=["audio"]),
    "chat: functions": chat(functions=[{"name": "f"}]),
    "chat: store": chat(store=True),
    "chat: input_ids": chat(input_ids=[1, 2]),
    "chat: truncation_side": chat(truncation_side="right"),
    "chat: truncate_prompt_tokens is 0": chat(truncate_prompt_tokens=0),
    "completions: echo of a truncated prompt": text(echo=True, truncate_prompt_tokens=2),
    "predict: a pair": post("/predict", inputs=["a", "b"]),
    "decode: no ids": post("/decode", ids=[]),
    "template: not Jinja": post("/template/inspect", template="{% for"),
    "chat: bootstrap_host": chat(bootstrap_host="a"),
    "chat: an unknown field with almost a known name": chat(max_token=3),
    # Text completions.
    "completions: no prompt": post(TEXT, model="echo"),
    "completions: prompt is null": text(prompt=None),
    "completions: prompt is a number": text(prompt=3),
    "completions: prompt is an empty list": text(prompt=[]),
    "completions: a token id is negative": text(prompt=[1, -2]),
    "completions: a list mixes text and numbers": text(prompt=["a", 3]),
    "completions: an empty list of token ids": text(prompt=[[1], []]),
    "completions: an unknown model": text(model="gpt-9"),
    "completions: max_tokens is 0": text(max_tokens=0),
    "completions: logprobs is true": text(logprobs=True),
    "completions: logprobs is too high": text(logprobs=21),
    "completions: best_of is less than n": text(best_of=2, n=3),
    "completions: best_of in a stream": text(best_of=2, stream=True),
    "completions: echo of an unknown token id": text(prompt=[50_000], echo=True),
    "completions: echo with logprobs in a stream": text(echo=True, logprobs=1, stream=True),
    "completions: suffix": text(suffix="end", echo=True),
    "completions: tools": text(tools=[TOOL]),
    "completions: top_logprobs": text(top_logprobs=2),
    "completions: too many prompts": text(prompt=["a"] * 129),
    # The Responses API.
    "responses: no input": post(RESPONSES, model="echo"),
    "responses: an empty input": respond(input=""),
    "responses: an unknown model": respond(model="gpt-9"),
    "responses: an item of an unknown type": respond(input=[{"type": "web_search_call"}]),
    "responses: an item without content": respond(input=[{"type": "message", "role": "user"}]),
    "responses: an audio file": respond(
        input=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
    ),
    "responses: the output of a call that was never made": respond(
        input=[{"type": "function_call_output", "call_id": "c", "output": "1"}]
    ),
    "responses: messages": respond(messages=HELLO),
    "responses: max_tokens": respond(max_tokens=3),
    "responses: n": respond(n=2),
    "responses: max_output_tokens is 0": respond(max_output_tokens=0),
    "responses: max_output_tokens is over the backend's limit": respond(
        max_output_tokens=2_000_000
    ),
    "responses: an unknown include": respond(include=["file_search_call.results"]),
    "responses: an unknown truncation": respond(truncation="left"),
    "responses: too much metadata": respond(metadata={str(i): "a" for i in range(17)}),
    "responses: a long metadata value": respond(metadata={"a": "b" * 513}),
    "responses: reasoning.mode": respond(reasoning={"mode": "fast"}),
    "responses: reasoning.effort is a number": respond(reasoning={"effort": 3}),
    "responses: text.verbosity": respond(text={"verbosity": "high"}),
    "responses: text.format is a string": respond(text={"format": "json"}),
    "responses: an unknown text.format": respond(text={"format": {"type": "xml"}}),
    "responses: a text.format without a schema": respond(text={"format": {"type": "json_schema"}}),
    "responses: a tool that is not a function": respond(tools=[{"type": "web_search"}]),
    "responses: a tool without a name": respond(tools=[{"type": "function"}]),
    "responses: a tool whose strict is a string": respond(tools=[{**FLAT_TOOL, "strict": "yes"}]),
    "responses: two tools with one name in a namespace": respond(
        tools=[
            {"type": "namespace", "name": "a", "tools": [FLAT_TOOL]},
            {"type": "function", "name": "a__f"},
        ]
    ),
    "responses: a namespace without tools": respond(tools=[{"type": "namespace", "name": "a"}]),
    "responses: defer_loading": respond(tools=[{**FLAT_TOOL, "defer_loading": True}]),
    "responses: a tool_choice of another form": respond(
        tools=[FLAT_TOOL], tool_choice={"type": "some"}
    ),
    "responses: background without store": respond(background=True, store=False),
    "responses: include_obfuscation": respond(
        stream=True, stream_options={"include_obfuscation": True}
    ),
    "responses: store where nothing is stored": {
        **respond(store=True),
        "settings": {"max_stored_responses": 0},
    },
    "responses: an unknown previous_response_id": respond(previous_response_id="resp_0"),
    "responses: an unknown item reference": respond(
        input=[{"type": "item_reference", "id": "msg_0"}]
    ),
    "responses: retrieve an unknown response": get("/v1/responses/resp_0"),
    "responses: delete an unknown response": {"method": "DELETE", "path": "/v1/responses/resp_0"},
    "responses: cancel an unknown response": post("/v1/responses/resp_0/cancel"),
    "responses: items of an unknown response": get("/v1/responses/resp_0/input_items"),
    "responses: cancel what did not run in the background": {
        "first": respond(),
        **post("/v1/responses/ID/cancel"),
    },
    "responses: events of what did not run in the background": {
        "first": respond(),
        **get("/v1/responses/ID?stream=true"),
    },
    "responses: starting_after is no number": {
        "first": respond(),
        **get("/v1/responses/ID?stream=true&starting_after=x"),
    },
    "responses: limit is too high": {
        "first": respond(),
        **get("/v1/responses/ID/input_items?limit=101"),
    },
    "responses: limit is 0": {"first": respond(), **get("/v1/responses/ID/input_items?limit=0")},
    "responses: an unknown order": {
        "first": respond(),
        **get("/v1/responses/ID/input_items?order=up"),
    },
    "responses: after names no item": {
        "first": respond(),
        **get("/v1/responses/ID/input_items?after=msg_0"),
    },
    "input_tokens: no input": post("/v1/responses/input_tokens"),
    # Embeddings.
    "embeddings: no input": post(EMBEDDINGS, model="tiny-embed"),
    "embeddings: an empty list": post(EMBEDDINGS, input=[]),
    "embeddings: input is a number": post(EMBEDDINGS, input=3),
    "embeddings: a list mixes text and numbers": post(EMBEDDINGS, input=["a", 3]),
    "embeddings: an empty list of token ids": post(EMBEDDINGS, input=[[]]),
    "embeddings: a content part without content": post(EMBEDDINGS, input=[{"type": "text"}]),
    "embeddings: an unknown model": post(EMBEDDINGS, model="gpt-9", input="a"),
    "embeddings: the reranker's name": post(EMBEDDINGS, model="tiny-rerank", input="a"),
    "embeddings: the language model's name": post(EMBEDDINGS, model="echo", input="a"),
    "embeddings: dimensions is 0": post(EMBEDDINGS, input="a", dimensions=0),
    "embeddings: dimensions is too large": post(EMBEDDINGS, input="a", dimensions=99),
    "embeddings: an unknown encoding_format": post(EMBEDDINGS, input="a", encoding_format="hex"),
    "embeddings: an unknown embed_dtype": post(EMBEDDINGS, input="a", embed_dtype="float16"),
    "embeddings: two prompts": post(EMBEDDINGS, input="a", prompt="b", prompt_name="query"),
    "embeddings: a text that is too long": post(EMBEDDINGS, input=["a", "b" * 13]),
    "embeddings: truncate_prompt_tokens is 5": post(
        EMBEDDINGS, input="a", truncate_prompt_tokens=5
    ),
    "embeddings: texts are cut on the left": post(
        EMBEDDINGS, input="a", truncation_direction="left"
    ),
    "embeddings: no such model on the server": {
        **post(EMBEDDINGS, input="a"),
        "missing": ["embedding"],
    },
    "embeddings: a model without a checkpoint": {
        **post(EMBEDDINGS, input="a"),
        "unconfigured": ["embedding"],
    },
    "embeddings: a model that does not answer": {
        **post(EMBEDDINGS, input="a"),
        "down": ["embedding"],
    },
    "embed: no inputs": post("/embed", model="tiny-embed"),
    "embed: a text that is too long": post("/embed", inputs="b" * 13),
    "embed_sparse: a model without sparse weights": {
        **post("/embed_sparse", inputs="a"),
        "kinds": {"embedding": ["dense"]},
    },
    "v2/embed: nothing to embed": post("/v2/embed", model="tiny-embed"),
    "v2/embed: texts and images": post("/v2/embed", texts=["a"], images=["b"]),
    "v2/embed: an input of two parts": post(
        "/v2/embed", inputs=[{"content": [{"type": "text", "text": "a"}] * 2}]
    ),
    "v2/embed: max_tokens is below the model's limit": post("/v2/embed", texts=["a"], max_tokens=3),
    "v2/embed: output_dimension is too large": post("/v2/embed", texts=["a"], output_dimension=99),
    "v2/embed: an unknown embedding type": post("/v2/embed", texts=["a"], embedding_types=["int4"]),
    "v2/embed: an unknown truncate": post("/v2/embed", texts=["a"], truncate="START"),
    "pooling: an unknown task": post("/pooling", input="a", task="plugin"),
    "pooling: no input": post("/pooling"),
    # Rerank, score and classify.
    "rerank: no query": post("/v1/rerank", documents=["a"]),
    "rerank: no documents": post("/v1/rerank", query="a"),
    "rerank: documents and texts": post("/v1/rerank", query="a", documents=["a"], texts=["a"]),
    "rerank: an empty list": post("/v1/rerank", query="a", documents=[]),
    "rerank: an empty list of texts": post("/rerank", query="a", texts=[]),
    "rerank: a document is a number": post("/v1/rerank", query="a", documents=["a", 3]),
    "rerank: query is a number": post("/v1/rerank", query=3, documents=["a"]),
    "rerank: top_n is negative": post("/v1/rerank", query="a", documents=["a"], top_n=-1),
    "rerank: an unknown format": post("/v1/rerank", query="a", documents=["a"], format="xml"),
    "rerank: an unknown format in the query string": post(
        "/v1/rerank?format=xml", query="a", documents=["a"]
    ),
    "rerank: an unknown model": post("/v1/rerank", model="gpt-9", query="a", documents=["a"]),
    "rerank: the embedding model's name": post(
        "/v1/rerank", model="tiny-embed", query="a", documents=["a"]
    ),
    "rerank: max_tokens_per_doc is below the model's limit": post(
        "/v1/rerank", query="a", documents=["a"], max_tokens_per_doc=3
    ),
    "rerank: no reranker is served": {
        **post("/v2/rerank", query="a", documents=["a"]),
        "unconfigured": ["rerank"],
    },
    "score: no texts": post("/v1/score", model="tiny-rerank"),
    "score: one side alone": post("/v1/score", text_1="a"),
    "score: an empty side": post("/v1/score", text_1="a", text_2=[]),
    "score: sides of different lengths": post("/score", text_1=["a", "b"], text_2=["a"] * 3),
    "score: a number": post("/v1/score", queries="a", documents=[3]),
    "classify: no input": post("/classify", model="tiny-rerank"),
    "classify: input is a number": post("/classify", input=3),
    "classify: a model without a classifier": {
        **post("/classify", input="a"),
        "kinds": {"rerank": ["score"]},
    },
    # Tokenize, models, health, paths and methods.
    "tokenize: nothing": post("/tokenize"),
    "tokenize: a prompt and a chat": post("/tokenize", prompt="a", messages=HELLO),
    "tokenize: prompt is a number": post("/v1/tokenize", prompt=3),
    "tokenize: return_token_strs": post("/tokenize", prompt="a", return_token_strs=True),
    "tokenize: an unknown model": post("/tokenize", model="gpt-9", prompt="a"),
    "models: an unknown model": get("/v1/models/org/name"),
    "an unknown path": get("/v1/nothing"),
    "a wrong method": get(CHAT),
    "a wrong method on models": {"method": "DELETE", "path": "/v1/models"},
    "health: the server is down": {**get("/health"), "is_up": False},
    "health/ready: the server is down": {**get("/health/ready"), "is_up": False},
    "health/ready: the server is stopping": {**get("/health/ready"), "is_draining": True},
    # Keys and limits.
    "no API key": {**chat(), "settings": {"api_key": "s3cret"}},
    "no API key for the list of models": {
        **get("/v1/models"),
        "settings": {"api_key": "s3cret"},
    },
    "a wrong API key": {
        **chat(),
        "settings": {"api_key": "s3cret"},
        "headers": {"Authorization": "Bearer wrong"},
    },
    "a body over max_body_bytes": {
        **raw("x" * 2000),
        "settings": {"max_body_bytes": 1000},
    },
    "a host name that is not allowed": get("/v1/models", headers={"Host": "evil.example"}),
    "a body over max_body_bytes without a length": {
        **raw("x" * 2000),
        "settings": {"max_body_bytes": 1000},
        "in_pieces": True,
    },
    "a request over max_concurrent_requests": {**chat(), "num_running": 1024},
    "embeddings over max_concurrent_requests": {
        **post(EMBEDDINGS, input="a"),
        "num_running": 1024,
    },
    "a request to a server that stops": {**chat(), "is_draining": True},
    "a request that takes longer than request_timeout_s": {
        **say("<pause 5> late"),
        "settings": {"request_timeout_s": 1},
        "headers": {"X-Request-Timeout": "0.05"},
    },
    "a stream that takes longer than its X-Request-Timeout": {
        **say("soon <pause 5> late", stream=True),
        "headers": {"X-Request-Timeout": "0.1"},
    },
    "an X-Request-Timeout that is no number": {**chat(), "headers": {"X-Request-Timeout": "soon"}},
    "an X-Request-Timeout of 0": {**chat(), "headers": {"X-Request-Timeout": "0"}},
    # Errors of the backend.
    "backend: the server is down": {**chat(), "is_up": False},
    "backend: invalid argument": say("<fail INVALID_ARGUMENT it is wrong>"),
    "backend: invalid argument with a field": say(
        "<fail INVALID_ARGUMENT temperature: must be at least 0, got -1>"
    ),
    "backend: invalid argument of a text": text(
        prompt="<fail INVALID_ARGUMENT text_input: is empty>"
    ),
    "backend: a prompt that is too long": say(
        "<fail INVALID_ARGUMENT prompt has 9 tokens; the limit is 4 (max_model_len)>"
    ),
    "backend: a response's field": {
        "path": RESPONSES,
        "json": {"input": "<fail INVALID_ARGUMENT messages[0].content: is empty>"},
    },
    "backend: a full queue": say("<fail UNAVAILABLE the queue is full; try again in 7 s>"),
    "backend: resources are exhausted": say("<fail RESOURCE_EXHAUSTED too many>"),
    "backend: cancelled": say("<fail CANCELLED it was cancelled>"),
    "backend: a deadline": say("<fail DEADLINE_EXCEEDED it took too long>"),
    "backend: an internal error": say("<fail INTERNAL it broke>"),
    "backend: an unknown code": say("<fail NOT_FOUND it is not there>"),
    "backend: no end": say("some <vanish>"),
    "backend: an error in a stream": say("some <fail INTERNAL it broke>", stream=True),
    "backend: an error in a stream of completions": text(
        prompt="some <fail UNAVAILABLE the queue is full>", stream=True
    ),
    "backend: an error in a stream of a response": {
        "path": RESPONSES,
        "json": {"input": "some <fail INTERNAL it broke>", "stream": True},
    },
}


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def outcome(case):
    """Send the request of a case, and return the answer's status and the error's fields.

    The fields are `type`, `code` and `param`. If an error ends a stream, the status is 200, and
    the fields are those of the error in the stream's last event.
    """
    async with opened(case) as (app, client):
        path = case["path"]
        if "first" in case:  # a request that creates the object whose id replaces "ID" in the path
            first = await client.post(case["first"]["path"], json=case["first"]["json"])
            path = path.replace("ID", first.json()["id"])
        gate = app.state.gate  # counts the running requests
        num_running = case.get("num_running", 0)
        for _ in range(num_running):
            gate.enter()
        gate.is_draining = case.get("is_draining", False)

        response = await client.request(
            case.get("method", "POST"), path, headers=case.get("headers"), **body_of(case)
        )

        for _ in range(num_running):
            gate.leave()
    return {"status": response.status_code, **error_of(response)}


@asynccontextmanager
async def opened(case):
    """Run the application with a case's settings and backends. Yield it with its client."""
    backend, pooling = FakeBackend(), FakePooling()
    backend.is_up = case.get("is_up", True)
    for name in ("missing", "down", "unconfigured"):
        getattr(pooling, name).update(case.get(name, ()))
    pooling.kinds |= case.get("kinds", {})
    settings = Settings(served_model_name="echo", **case.get("settings", {}))
    app = create_app(settings, lambda: backend)
    app.state.make_pooling = lambda: pooling
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield app, client


def body_of(case):
    """Return the arguments for httpx with the body of a case: JSON, text, bytes or pieces."""
    if "json" in case:
        return {"json": case["json"]}
    content = case.get("content")
    return {"content": pieces_of(content) if case.get("in_pieces") else content}


async def pieces_of(content):
    """Yield the content in two pieces. httpx sends a body in pieces without a Content-Length."""
    middle = len(content) // 2
    for piece in (content[:middle], content[middle:]):
        yield piece.encode()


def error_of(response):
    """Return the `type`, `code` and `param` of a response's error.

    Return an empty dictionary for the routes /health and /health/ready, which send no error object.
    """
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = response.text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        last = json.loads(events[-1])
        error = last["response"]["error"] if "response" in last else last["error"]
    else:
        error = response.json().get("error")
    if error is None:
        return {}
    assert error["message"]
    return {name: error.get(name) for name in ("type", "code", "param")}


def test_every_case_is_in_the_data_file():
    assert list(json.loads(DATA.read_text())) == list(CASES)


@pytest.mark.parametrize("name", CASES)
async def test_an_error_keeps_its_status_type_code_and_param(name):
    assert await outcome(CASES[name]) == json.loads(DATA.read_text())[name]


async def _outcomes():
    return {name: await outcome(case) for name, case in CASES.items()}


if __name__ == "__main__":
    lines = [
        f"  {json.dumps(name)}: {json.dumps(values)}"
        for name, values in asyncio.run(_outcomes()).items()
    ]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
