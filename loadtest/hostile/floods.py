"""Floods: many requests at the same time, most of which are abandoned."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from loadtest.hostile.attack import Attack, Outcome, Send, Target, chat, post, worst
from loadtest.hostile.grammars import object_schema, schema_request

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"


def attacks() -> Iterator[Attack]:
    """Yield attacks of several requests at the same time, most of which are abandoned."""
    long_prompt = {"prompt": "word " * 3_000, "max_tokens": 900, "ignore_eos": True}
    schema = schema_request(object_schema(5_000, pattern="^[a-z]{1,40}$"))
    ids = {"prompt": [5] * 2_000, "max_tokens": 900, "ignore_eos": True, "stream": True}
    text = {"prompt": "word " * 10**6}
    mixed = [
        post(_COMPLETIONS, text, leave_after_s=0.4),
        post(_CHAT, schema, leave_after_s=0.4),
        post(_COMPLETIONS, {"prompt": [5] * 3_000_000}, leave_after_s=0.4),
    ]
    background = {"input": "hi", "background": True, "max_output_tokens": 500}
    choices = chat(n=64, logprobs=True, top_logprobs=20, max_tokens=40)
    ranked = {"query": "q", "documents": ["some words " * 40] * 50}
    floods = {
        "4 schemas of 5,000 properties, abandoned": _together(
            4, post(_CHAT, schema, leave_after_s=0.5)
        ),
        "200 long requests, abandoned after 2 s": _together(
            200, post(_COMPLETIONS, long_prompt, leave_after_s=2)
        ),
        "200 streams, abandoned after 1 s": _together(
            200, post(_COMPLETIONS, ids, leave_after_s=1)
        ),
        "8 prompts of 5 MB, abandoned": _together(8, post(_COMPLETIONS, text, leave_after_s=0.3)),
        "a mixture, abandoned": _together(12, *mixed),
        "100 responses in the background": _together(100, post("/v1/responses", background)),
        "64 choices with logprobs, 16 times": _together(16, post(_CHAT, choices, leave_after_s=3)),
        "rerank 64 times": _together(64, post("/v1/rerank", ranked, leave_after_s=3)),
    }
    for name, send in floods.items():
        yield Attack("flood", name, send)
    huge = {"prompt": "word " * 8 * 10**6}
    send = _together(8, post(_COMPLETIONS, huge))
    yield Attack("flood", "8 prompts of 40 MB", send, (400, 408, 413, 429))


def _together(count: int, *sends: Send) -> Send:
    """Return a function that sends `count` requests at once, and returns the worst outcome."""

    def send(target: Target, limit_s: float) -> Outcome:
        with ThreadPoolExecutor(count) as pool:
            chosen = [sends[index % len(sends)] for index in range(count)]
            outcomes = pool.map(lambda one: one(target, limit_s), chosen)
            return worst(outcomes)

    return send
