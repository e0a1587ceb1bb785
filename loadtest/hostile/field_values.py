"""Attacks with a hostile value in one field of a request to the OpenAI API.

One attack sends all values of one field, one after the other. The outcome is the worst answer.
"""

import json
from collections.abc import Iterator, Mapping

from nereid_client.anthropic.messages_request import MessagesRequest
from nereid_client.protocol.embedding_requests import CohereEmbedRequest, VectorsRequest
from nereid_client.protocol.generation_requests import ChatCompletionRequest, CompletionRequest
from nereid_client.protocol.operations.tokenize_request import TokenizeRequest
from nereid_client.protocol.refused import REFUSED, REFUSED_IN_CHAT
from nereid_client.protocol.request_body import RequestBody
from nereid_client.protocol.rerank_requests import ClassifyRequest, RerankRequest, ScoreRequest
from nereid_client.protocol.responses_request import ResponsesRequest

from loadtest.hostile.attack import Attack, Outcome, Send, Target, worst
from loadtest.hostile.requests import CHATS, COMPLETIONS, chat, post

# The hostile values are JSON texts, because `json.dumps` cannot write some of them.
_VALUES = (
    *("null", "true", "0", "-1", "1.5", "1e308", "-1e999", "NaN", "Infinity"),
    *("9223372036854775808", "1" + "0" * 400, '""', '"\\u0000"', '"\\ud800"', '"../../etc/passwd"'),
    *("[]", "{}", "[null]", "[[[[]]]]", '{"": {"": []}}', '["a", 1, {}]', '{"type": "x"}'),
    *('[{"type": []}]', '{"\\ud800": NaN}', '"' + "x" * 70_000 + '"', "[" * 300 + "]" * 300),
    *('[{"role": {}, "content": [{}]}]', '[{"type": "function", "function": {"name": 7}}]'),
    *('{"type": {"type": {}}}', "[-1]", "[1e30]", '{"5": "x"}', '{"-1": 1e999}'),
)
# Without max_tokens, an answer ends at one of these letters.
_STOP = list("aeiou")
_LIMIT_S = 60.0  # the limit for all values of a field together
_ROUTES: Mapping[str, tuple[type[RequestBody], dict[str, object]]] = {
    CHATS: (ChatCompletionRequest, chat(stop=_STOP)),
    COMPLETIONS: (CompletionRequest, {"prompt": "hi", "max_tokens": 2, "stop": _STOP}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 16}),
    "/v1/messages": (MessagesRequest, chat(stop_sequences=_STOP)),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/v1/embeddings": (VectorsRequest, {"input": "hi"}),
    "/v2/embed": (CohereEmbedRequest, {"texts": ["hi"], "input_type": "search_query"}),
    "/v1/rerank": (RerankRequest, {"query": "q", "documents": ["d"]}),
    "/v1/score": (ScoreRequest, {"text_1": "q", "text_2": "d"}),
    "/classify": (ClassifyRequest, {"input": "hi"}),
}
# A short time limit in `timeout` or `queue_timeout` gives the status 504 or 503.
_ALLOWED = {"timeout": (200, 400, 504), "queue_timeout": (200, 400, 503)}


def attacks() -> Iterator[Attack]:
    """Yield one attack for each field of each route."""
    for path, (model, body) in _ROUTES.items():
        refused = {**REFUSED, **REFUSED_IN_CHAT} if path == CHATS else {}
        for field in sorted({*model.model_fields, *refused}):
            send = _each_value(path, body, field)
            allowed = _ALLOWED.get(field, ())
            yield Attack("field", f"{path}: {field}", send, allowed=allowed, limit_s=_LIMIT_S)


def _each_value(path: str, body: Mapping[str, object], field: str) -> Send:
    """Return a function that sends a request for each hostile value of a field."""
    others = {name: value for name, value in body.items() if name != field}
    other_texts = [f'"{name}": {json.dumps(value)}' for name, value in others.items()]

    def send(target: Target, limit_s: float) -> Outcome:
        bodies = (", ".join([f'"{field}": {value}', *other_texts]) for value in _VALUES)
        sends = [post(path, f"{{{text}}}".encode()) for text in bodies]
        return worst(send_one(target, limit_s) for send_one in sends)

    return send
