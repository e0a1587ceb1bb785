# SPDX-License-Identifier: Apache-2.0
"""Validates the tensors of a pooling request, and converts the tensors to the inputs of a job."""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nereid_backend.errors import RequestError
from nereid_backend.pooling.inputs.text_size import TRUNCATE_REMEDY
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving.tokenizer.surrogate_pairs import refuse_surrogates

EMBEDDING_OPTIONS: Mapping[str, type] = {
    "kind": str,
    "dimensions": int,
    "normalize": bool,
    "prompt_name": str,
    "prompt": str,
    "truncate": bool,
}
RERANK_OPTIONS: Mapping[str, type] = {
    "activation": str,
    "instruction": str,
    "truncate": bool,
}
# Parsing more JSON text would delay other requests, and parsed lists need much more memory than
# their text. Only a prompt or an instruction can be long.
_MAX_OPTIONS_CHARS = 2**20
# The largest number of opening brackets in a part, see `_check_num_brackets`.
_MAX_PART_BRACKETS = 2**17
# If a text is a URL, `://` occurs within its first `_MAX_SCHEME_CHARS` characters. Therefore, only
# these characters are searched.
_MAX_SCHEME_CHARS = 16
_TYPE_NAMES = {str: "text", int: "an integer", bool: "true or false"}


def parse_options(text: str | None, known: Mapping[str, type]) -> dict[str, Any]:
    """Parse the JSON text of the tensor `options`, and return all options that are not null.

    Args:
        text: the JSON text of an object; None or "" for no options.
        known: the known options and their types.

    Raises:
        RequestError: the text is too long or is not a JSON object, a name is unknown, or a value
            has a wrong type.
    """
    if not text:
        return {}
    if len(text) > _MAX_OPTIONS_CHARS:
        raise RequestError(
            f"{names.OPTIONS}: the text has {len(text)} characters, but the limit is "
            f"{_MAX_OPTIONS_CHARS}. Send shorter options."
        )
    try:
        values = json.loads(text)
        refuse_surrogates(names.OPTIONS, text, values)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{names.OPTIONS}: the text is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError(
            f"{names.OPTIONS}: the text must be a JSON object, but it is {text[:80]}."
        )
    for name, value in values.items():
        _check_option(name, value, known)
    return {name: value for name, value in values.items() if value is not None}


def _check_option(name: str, value: Any, known: Mapping[str, type]) -> None:  # noqa: ANN401 - any JSON value
    """Raise a RequestError if an option is unknown or has a wrong value. null is allowed."""
    if name not in known:
        raise RequestError(
            f"{names.OPTIONS}: the option {name!r} is not known. The known options are "
            f"{', '.join(sorted(known))}."
        )
    # `isinstance` would accept True as an integer.
    if value is not None and type(value) is not known[name]:
        raise RequestError(
            f"{name}: the value must be {_TYPE_NAMES[known[name]]}, but it is "
            f"{json.dumps(value)[:80]}."
        )


def decode_texts(values: Iterable[Any], field: str) -> list[str]:
    """Decode the elements of the STRING tensor `field`, and return the texts.

    Raises:
        RequestError: an element is not UTF-8.
    """
    decoded = []
    for index, value in enumerate(values):
        try:
            decoded.append(value if isinstance(value, str) else value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(f"{field}: element {index} is not valid UTF-8: {error}") from None
    return decoded


def split_token_ids(
    ids: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32] | None,
    max_len: int,
    *,
    truncate: bool = False,
) -> list[list[int]]:
    """Split concatenated token ids into one list for each input.

    All lengths are checked before a list is created, because a list takes nine times as much
    memory as the array. Example: the ids [5, 6, 7] and the lengths [1, 2] return [[5], [6, 7]].

    Args:
        ids: the token ids of all inputs, of shape [sum of lengths].
        lengths: the number of tokens of each input, of shape [n]. None means one input, which may
            be empty: the ids [] then return [[]].
        max_len: the largest number of tokens of one input.
        truncate: whether a longer input is truncated to its first `max_len` tokens. If False, a
            longer input is refused.

    Raises:
        RequestError: a length is below 1, a length is too large, or the sum of the lengths differs
            from the number of ids.
    """
    if lengths is None:
        lengths = np.array([ids.size], dtype=np.int32)
    else:
        _check_lengths(lengths, ids.size)
    if not lengths.size:
        return []
    if not truncate:
        _refuse_long_input(lengths, max_len)
    # `np.split` needs the end position of each input except the last one.
    ends = np.cumsum(lengths)[:-1]
    return [ids_of_input[:max_len].tolist() for ids_of_input in np.split(ids, ends)]


def _check_lengths(lengths: npt.NDArray[np.int32], num_ids: int) -> None:
    """Raise a RequestError if a length is below 1, or if the lengths do not add up to `num_ids`."""
    if lengths.size and int(lengths.min()) < 1:
        raise RequestError(
            f"{names.INPUT_LENGTHS}: each length must be at least 1, but one is {lengths.min()}."
        )
    total = int(lengths.sum())
    if total != num_ids:
        raise RequestError(
            f"{names.INPUT_LENGTHS}: the sum of the lengths is {total}, but {names.INPUT_IDS} has "
            f"{num_ids} elements."
        )


def _refuse_long_input(lengths: npt.NDArray[np.int32], max_len: int) -> None:
    """Raise a RequestError if the longest input has more than `max_len` tokens."""
    longest = int(lengths.argmax())
    if lengths[longest] <= max_len:
        return
    element = f" element {longest}:" if lengths.size > 1 else ""
    raise RequestError(
        f"{names.INPUT_IDS}:{element} the input has {lengths[longest]} tokens, but the limit "
        f"is {max_len} (max_model_len). {TRUNCATE_REMEDY}"
    )


def parse_part(text: str, index: int) -> dict[str, str | bytes]:
    """Parse one element of the tensor `parts`, and decode its image.

    The result has the key `text` (str), the key `image` (bytes), or both. Example: the JSON text
    `{"text": "hello", "image": "aGk="}` returns `{"text": "hello", "image": b"hi"}`.

    Raises:
        RequestError: the element is not a JSON object with one or both of these keys, a value is
            not a string, or the image is not base64.
    """
    where = f"{names.PARTS}: element {index}"
    fields = _parse_part_fields(text, where)
    return {
        name: decode_image(value, where) if name == "image" else value
        for name, value in fields.items()
    }


def _parse_part_fields(text: str, where: str) -> dict[str, str]:
    """Parse a JSON object that has the key `text`, the key `image`, or both.

    Args:
        text: the JSON text.
        where: the beginning of error messages.

    Raises:
        RequestError: the text is not such an object, or a value is not a string.
    """
    _check_num_brackets(text, where)
    try:
        part = json.loads(text)
        refuse_surrogates(where, text, part)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(part, dict) or not part or not part.keys() <= {"text", "image"}:
        raise RequestError(
            f'{where} must be {{"text": ...}}, {{"image": ...}} or an object with both keys, but '
            f"it is {text[:80]}."
        )
    for name, content in part.items():
        if not isinstance(content, str):
            raise RequestError(f"{where}: {name} must be a string, but the element is {text[:80]}.")
    return part


def _check_num_brackets(text: str, where: str) -> None:
    """Raise a RequestError if parsing a JSON text could block other requests.

    Parsing very many lists or objects takes long, so the opening brackets are counted before the
    text is parsed. Brackets inside strings count, too. Therefore the limit is high, although a
    valid part needs only one bracket. `where` is the beginning of the error message.
    """
    if text.count("[") + text.count("{") > _MAX_PART_BRACKETS:
        raise RequestError(
            f"{where} has more than {_MAX_PART_BRACKETS} opening brackets, which is the limit. "
            "Send a shorter text."
        )


def decode_image(text: str, where: str) -> bytes:
    """Decode an image, and return its bytes. The image is a data: URL or plain base64 text.

    Example: "data:image/png;base64,iVBORw==" returns the bytes 89 50 4E 47, and so does "iVBORw==".

    Args:
        text: the URL or the base64 text.
        where: the beginning of error messages.

    Raises:
        RequestError: the text is not valid base64, or is a URL that is not a data: URL. The server
            does not download images for these models.
    """
    encoded = text
    if text[:5].lower() == "data:":
        header, comma, encoded = text.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise RequestError(f"{where}: a data: URL must have the form data:image/...;base64,...")
    elif "://" in text[:_MAX_SCHEME_CHARS]:
        raise RequestError(
            f"{where}: this server does not fetch URLs such as {text[:80]!r}. Send the image as a "
            "data: URL or as base64 text."
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where}: the image is not valid base64: {error}") from None


def parse_document(text: str, index: int) -> str | bytes:
    """Parse a document of the model `rerank`. `text` is one element of the tensor `parts`.

    Example: `{"text": "hello"}` returns "hello".

    Raises:
        RequestError: the element is neither one text nor one image.
    """
    contents = list(parse_part(text, index).values())
    if len(contents) > 1:
        raise RequestError(
            f"{names.PARTS}: element {index} has both a text and an image, but a document must be "
            "one of them. Send two documents."
        )
    return contents[0]


def pair_queries(
    queries: Sequence[str], documents: Sequence[str | bytes]
) -> list[tuple[str, str | bytes]]:
    """Pair the first query with the first document, the second with the second, and so on.

    Example: the queries ["p", "q"] and the documents ["a", "b"] return [("p", "a"), ("q", "b")].
    The caller does not call this function if the request has one query for all documents.

    Raises:
        RequestError: the number of queries differs from the number of documents.
    """
    if len(queries) != len(documents):
        raise RequestError(
            f"{names.QUERY}: a request must have one query, or one query for each of the "
            f"{len(documents)} documents, but it has {len(queries)} queries."
        )
    return list(zip(queries, documents, strict=True))
