"""Random JSON schemas like those of requests, and random texts that a guide allows."""

import string

import numpy as np

STOPS = frozenset({0, 2})  # the end-of-sequence tokens of the demo model


def schema(rng, depth=0):
    """Return a random schema. At depth 0, the schema is the schema of an object."""
    kinds = [_string, _integer, _number, _enum, _boolean, _null]
    if depth == 0:
        return _object(rng, depth)
    if depth < 3:
        kinds += [_object, _array, _any_of, _object, _array]
    return rng.choice(kinds)(rng, depth)


def _word(rng):
    return "".join(rng.choices(string.ascii_lowercase + "_é ", k=rng.randint(1, 7))).strip() or "k"


def _object(rng, depth):
    names = list(dict.fromkeys(_word(rng) for _ in range(rng.randint(0, 4))))
    result = {"type": "object", "properties": {n: schema(rng, depth + 1) for n in names}}
    result["required"] = [n for n in names if rng.random() < 0.6]
    if rng.random() < 0.7:
        result["additionalProperties"] = False
    return result


def _array(rng, depth):
    low = rng.randint(0, 2)
    result = {"type": "array", "items": schema(rng, depth + 1), "maxItems": low + rng.randint(0, 3)}
    return {**result, "minItems": low} if rng.random() < 0.5 else result


def _string(rng, depth):
    result = {"type": "string"}
    draw = rng.random()
    if draw < 0.2:
        result["pattern"] = rng.choice(["^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(ab|cd)+$", "x"])
    elif draw < 0.5:
        result["minLength"] = rng.randint(0, 3)
        result["maxLength"] = result["minLength"] + rng.randint(0, 9)
    elif draw < 0.6:
        result["format"] = rng.choice(["date", "date-time", "uuid", "ipv4"])
    return result


def _integer(rng, depth):
    result = {"type": "integer"}
    if rng.random() < 0.6:
        result["minimum"] = rng.randint(-50, 50)
        result["maximum"] = result["minimum"] + rng.randint(0, 500)
    return result


def _number(rng, depth):
    result = {"type": "number"}
    if rng.random() < 0.5:
        result["exclusiveMinimum"] = round(rng.uniform(-5, 5), 1)
        result["maximum"] = round(result["exclusiveMinimum"] + rng.uniform(0.5, 9), 1)
    return result


def _enum(rng, depth):
    values = [1, "one", None, True, 'zwei "2"', [1, 2], -3.5]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _boolean(rng, depth):
    return {"type": "boolean"}


def _null(rng, depth):
    return {"type": ["null", "string"]}


def _any_of(rng, depth):
    return {"anyOf": [schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def bits(row, size):
    """Return the token ids whose bits are set in a row of a token mask."""
    flags = np.unpackbits(row.view(np.uint8), bitorder="little")[:size]
    return np.flatnonzero(flags).tolist()


def walk(guide, vocabulary, rng, *, limit=400, jump=False):
    """Generate a random text that the guide allows.

    Tokens that end a part of the text are preferred, because otherwise few texts would end.

    Returns:
        The text, or None if it did not end within `limit` tokens.
    """
    row = np.zeros(-(-vocabulary.size // 32), np.int32)
    taken = []
    for _ in range(limit):
        forced = guide.forced() if jump else []
        if forced:
            guide.accept(forced)
            taken += forced
            continue
        assert guide.fill(row)
        allowed = bits(row, vocabulary.size)
        stops = [token for token in allowed if token in STOPS]
        others = [token for token in allowed if token not in STOPS]
        if stops and (not others or rng.random() < 0.5):
            guide.accept([stops[0]])
            return b"".join(vocabulary.tokens[token] for token in taken).decode("utf-8", "replace")
        closing = [token for token in others if vocabulary.tokens[token][:1] in b'"}],']
        token = rng.choice(closing if closing and rng.random() < 0.6 else others)
        guide.accept([token])
        taken.append(token)
    return None
