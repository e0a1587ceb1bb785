"""Random values that clients usually do not send."""

import copy
import json

ODD_TEXTS = (
    "",
    " ",
    "\0",
    "\ud800",
    "a" * 5000,
    "é漢😀\u2028",
    "<|im_end|>",
    "{{ 7 * 7 }}",
    "{% for x in range(10) %}{{ x }}{% endfor %}",
    "-1",
    "null",
    "../../etc/passwd",
    "%s%n",
)
ODD_NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e308, 1e-308, 2**31, 2**53, 2**63, -(2**63), 10**40, 65)
ODD_NAMES = ("temperature", "n", "stop", "seed", "stream", "tools", "x", "", "__class__", "min_p")


def odd(rng, depth=0):
    """Return a random JSON value."""
    kinds = ("constant", "number", "text", "nearly empty", "list", "object", "float")
    kind = rng.choice(kinds if depth < 3 else kinds[:4])
    if kind == "constant":
        return rng.choice((None, True, False))
    if kind == "number":
        return rng.choice(ODD_NUMBERS)
    if kind == "text":
        return rng.choice(ODD_TEXTS)
    if kind == "nearly empty":
        return rng.choice(([], {}, [[]], [{}], [None]))
    if kind == "list":
        return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == "object":
        return {rng.choice(ODD_NAMES): odd(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.uniform(-1e6, 1e6)


def mutated(rng, body, names):
    """Return a copy of a JSON object with one to three random changes.

    An added field gets one of the `names`.
    """
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        container, key = rng.choice(list(_places(body)) or [(body, "x")])
        change = rng.choice(("add a field", "remove", "append", "replace", "replace"))
        if change == "add a field" and isinstance(container, dict):
            container[rng.choice(names)] = odd(rng)
        elif change == "remove" and isinstance(container, dict):
            container.pop(key, None)
        elif change == "append" and isinstance(container, list):
            container.append(odd(rng))
        else:
            container[key] = odd(rng)
    return body


def _places(container):
    """Yield each value in a dict or list, at any depth, as its container and its key or index."""
    keys = container.keys() if isinstance(container, dict) else range(len(container))
    for key in list(keys):
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _places(container[key])


def damaged(rng, data):
    """Return `data` with a random piece deleted, repeated or replaced."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.randrange(1, 40))
    middle = rng.choice((b"", data[start:end] * 2, rng.randbytes(end - start), b"\xff\xfe", b'"'))
    return data[:start] + middle + data[end:]


def json_bytes(rng, body):
    """Return the JSON of a request body. Some of the results are damaged."""
    data = json.dumps(body).encode()
    return damaged(rng, data) if rng.random() < 0.15 else data
