"""Floods: many requests at the same time, most of which are abandoned."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from loadtest.hostile.attack import Attack, Outcome, Send, Target, make_attacks, worst
from loadtest.hostile.grammars import object_schema, schema_request
from loadtest.hostile.requests import CHATS, COMPLETIONS, chat, post


def attacks() -> Iterator[Attack]:
    """Yield attacks of several requests at the same time, most of which are abandoned."""
    schema = schema_request(object_schema(5_000, pattern="^[a-z]{1,40}$"))
    long_prompt = {"prompt": "word " * 3_000, "max_tokens": 900, "ignore_eos": True}
    stream = {"prompt": [5] * 2_000, "max_tokens": 900, "ignore_eos": True, "stream": True}
    text_of_5_mb = {"prompt": "word " * 10**6}
    mixed = [
        post(COMPLETIONS, text_of_5_mb, leave_after_s=0.4),
        post(CHATS, schema, leave_after_s=0.4),
        post(COMPLETIONS, {"prompt": [5] * 3_000_000}, leave_after_s=0.4),
    ]
    background = {"input": "hi", "background": True, "max_output_tokens": 500}
    choices = chat(n=64, logprobs=True, top_logprobs=20, max_tokens=40)
    ranked = {"query": "q", "documents": ["some words " * 40] * 50}
    sends = {
        "4 schemas of 5,000 properties, abandoned": _together(
            post(CHATS, schema, leave_after_s=0.5), count=4
        ),
        "200 long requests, abandoned after 2 s": _together(
            post(COMPLETIONS, long_prompt, leave_after_s=2), count=200
        ),
        "200 streams, abandoned after 1 s": _together(
            post(COMPLETIONS, stream, leave_after_s=1), count=200
        ),
        "8 prompts of 5 MB, abandoned": _together(
            post(COMPLETIONS, text_of_5_mb, leave_after_s=0.3), count=8
        ),
        "a mixture, abandoned": _together(*mixed, count=12),
        "100 responses in the background": _together(post("/v1/responses", background), count=100),
        "64 choices with logprobs, 16 times": _together(
            post(CHATS, choices, leave_after_s=3), count=16
        ),
        "rerank 64 times": _together(post("/v1/rerank", ranked, leave_after_s=3), count=64),
    }
    yield from make_attacks("flood", sends)
    send = _together(post(COMPLETIONS, {"prompt": "word " * 8 * 10**6}), count=8)
    yield Attack("flood", "8 prompts of 40 MB", send, allowed=(400, 408, 413, 429))


def _together(*sends: Send, count: int) -> Send:
    """Return a function that sends `count` requests at once, and returns the worst outcome.

    The requests are `sends`, repeated as often as necessary.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        chosen = itertools.islice(itertools.cycle(sends), count)
        with ThreadPoolExecutor(count) as pool:
            return worst(pool.map(lambda send_one: send_one(target, limit_s), chosen))

    return send
