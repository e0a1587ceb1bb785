"""Random JSON schemas like those of requests, and random texts that a guide allows."""

import string

import numpy as np

STOPS = frozenset({0, 2})


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
    found = {"type": "object", "properties": {n: schema(rng, depth + 1) for n in names}}
    found["required"] = [n for n in names if rng.random() < 0.6]
    if rng.random() < 0.7:
        found["additionalProperties"] = False
    return found


def _array(rng, depth):
    low = rng.randint(0, 2)
    found = {"type": "array", "items": schema(rng, depth + 1), "maxItems": low + rng.randint(0, 3)}
    return {**found, "minItems": low} if rng.random() < 0.5 else found


def _string(rng, depth):
    found = {"type": "string"}
    draw = rng.random()
    if draw < 0.2:
        found["pattern"] = rng.choice(["^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(ab|cd)+$", "x"])
    elif draw < 0.5:
        found["minLength"] = rng.randint(0, 3)
        found["maxLength"] = found["minLength"] + rng.randint(0, 9)
    elif draw < 0.6:
        found["format"] = rng.choice(["date", "date-time", "uuid", "ipv4"])
    return found


def _integer(rng, depth):
    found = {"type": "integer"}
    if rng.random() < 0.6:
        found["minimum"] = rng.randint(-50, 50)
        found["maximum"] = found["minimum"] + rng.randint(0, 500)
    return found


def _number(rng, depth):
    found = {"type": "number"}
    if rng.random() < 0.5:
        found["exclusiveMinimum"] = round(rng.uniform(-5, 5), 1)
        found["maximum"] = round(found["exclusiveMinimum"] + rng.uniform(0.5, 9), 1)
    return found


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
        ends = [one for one in allowed if one in STOPS]
        if ends and rng.random() < 0.5:
            guide.accept([ends[0]])
            return b"".join(vocabulary.tokens[one] for one in taken).decode("utf-8", "replace")
        allowed = [one for one in allowed if one not in STOPS] or allowed
        closing = [one for one in allowed if vocabulary.tokens[one][:1] in b'"}],']
        token = rng.choice(closing if closing and rng.random() < 0.6 else allowed)
        guide.accept([token])
        if token in STOPS:
            return b"".join(vocabulary.tokens[one] for one in taken).decode("utf-8", "replace")
        taken.append(token)
    return None
