"""The lines that a model writes to the log of the server."""

import io
import sys

from nereid_backend.serving import tensors


def test_a_character_outside_ascii_reaches_the_log(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))  # as in a stub
    tensors.progress("loading /модель \udce9")
    assert output.getvalue() == "nereid: loading /модель \\udce9\n".encode()
