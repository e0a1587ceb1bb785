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
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(ODD_NUMBERS)
    if kind == 2:
        return rng.choice(ODD_TEXTS)
    if kind == 3:
        return rng.choice(([], {}, [[]], [{}], [None]))
    if kind == 4:
        return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {rng.choice(ODD_NAMES): odd(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.uniform(-1e6, 1e6)


def mutated(rng, body, names):
    """Return a copy of a JSON object with one to three random changes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, key = rng.choice(list(_places(body)) or [(body, "x")])
        how = rng.randrange(5)
        if how == 0 and isinstance(place, dict):
            place[rng.choice(names)] = odd(rng)
        elif how == 1 and isinstance(place, dict):
            place.pop(key, None)
        elif how == 2 and isinstance(place, list):
            place.append(odd(rng))
        else:
            place[key] = odd(rng)
    return body


def _places(value):
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


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
