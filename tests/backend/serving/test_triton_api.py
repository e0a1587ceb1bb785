"""Tests of the lines that a model writes to the log of the server, and of its error responses."""

import io
import sys

import pytest
from backend.serving import fake_server  # noqa: F401 - replaces the API of Triton server
from nereid_backend import RequestError
from nereid_backend.serving import triton_api


def test_a_character_outside_ascii_reaches_the_log(monkeypatch):
    output = io.BytesIO()
    # In a stub of the server, the encoding of the output is also ASCII.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    triton_api.progress("loading /модель \udce9")
    assert output.getvalue() == "nereid: loading /модель \\udce9\n".encode()


@pytest.mark.parametrize("character", ["a", "\N{GRINNING FACE}"])
def test_an_error_message_fits_the_metadata_of_a_grpc_response(character):
    def text_of_error(message):
        return triton_api.error_response(RequestError(message)).error.text

    shortened = text_of_error(f"options: {character * 100_000}. Remove it.")
    assert shortened.startswith(f"[INVALID_ARGUMENT] options: {character}")
    assert f"{character}...{character}" in shortened
    assert shortened.endswith(f"{character}. Remove it.")
    # gRPC may write each byte as three characters (%F0), and allows 8 KiB of metadata.
    assert 3 * len(shortened.encode()) < 8192

    short = f"options: {character * 100}"
    assert text_of_error(short) == f"[INVALID_ARGUMENT] {short}"


@pytest.mark.parametrize("length", [1, 10_000])
def test_an_error_message_can_be_encoded(length):
    text = triton_api.error_response(RequestError("\ud800" * length)).error.text
    assert text.encode().startswith(b"[INVALID_ARGUMENT] \\ud800")
