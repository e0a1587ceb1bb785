"""Tests that clients can send audio as WAV files, and that wrong audio is refused."""

import base64
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from backend.vision import image_archs
from backend.vision.image_archs import RATE, audio_chat, noise, open_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.errors import RequestError
from nereid_backend.model.forward_path.media_references import _check_uses_audio
from nereid_backend.model.forward_path.reference_logits import ReferenceLogits
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.serving.tokenizer.image_prompts import may_accept_media, take_media
from nereid_backend.vision.audio_parts import read_audio, read_audio_url
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.messages import split_messages
from nereid_backend.vision.read_wav import decode_wav, resample

LIMITS = ImageLimits(max_audios=2, max_audio_s=2.0, max_bytes=200_000)
PCM, FLOAT, MULAW, EXTENSIBLE = 1, 3, 7, 0xFFFE
RIFF = b"RIFF\0\0\0\0WAVE"


def chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a WAV file."""
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def header(kind: int, num_bits: int, rate: int = RATE, num_channels: int = 1) -> bytes:
    """Return the chunk "fmt " of a WAV file, which describes the format of the samples."""
    frame_bytes = num_channels * num_bits // 8
    fields = (kind, num_channels, rate, rate * frame_bytes % 2**32, frame_bytes, num_bits)
    return chunk(b"fmt ", struct.pack("<HHIIHH", *fields))


def wav(content: bytes, kind: int = PCM, num_bits: int = 16, **fields: int) -> bytes:
    """Return a WAV file whose samples are the bytes `content`."""
    return RIFF + header(kind, num_bits, **fields) + chunk(b"data", content)


def pcm(samples: np.ndarray) -> bytes:
    """Return a WAV file with samples of 16 bits. The numbers in `samples` are from -1 to 1."""
    return wav((samples * 32767).astype("<i2").tobytes())


LEVELS = np.array([0.0, 0.5, -0.5, -1.0])
WIDE = (LEVELS * 2**31).clip(max=2**31 - 1).astype("<i4")
CONTENTS = {
    "8 bits": wav((LEVELS * 128 + 128).astype("u1").tobytes(), num_bits=8),
    "16 bits": wav((LEVELS * 2**15).astype("<i2").tobytes()),
    "24 bits": wav(WIDE.view("u1").reshape(-1, 4)[:, 1:].tobytes(), num_bits=24),
    "32 bits": wav(WIDE.tobytes(), num_bits=32),
    "floats": wav(LEVELS.astype("<f4").tobytes(), FLOAT, 32),
    "stereo": wav(
        np.stack([LEVELS * 1.5, LEVELS * 0.5], 1).clip(-1, 1).astype("<f4").tobytes(),
        FLOAT,
        32,
        num_channels=2,
    ),
    "unknown size, as FFmpeg writes it": RIFF
    + header(PCM, 16)
    + b"data\xff\xff\xff\xff"
    + (LEVELS * 2**15).astype("<i2").tobytes(),
    "unknown size, as SoX writes it": RIFF
    + header(PCM, 16)
    + b"data\x00\xf0\xff\x7f"
    + (LEVELS * 2**15).astype("<i2").tobytes(),
    "other chunks": RIFF
    + chunk(b"LIST", b"odd")
    + header(PCM, 16)
    + chunk(b"fact", b"")
    + chunk(b"data", (LEVELS * 2**15).astype("<i2").tobytes()),
    "extensible": RIFF
    + chunk(
        b"fmt ",
        struct.pack("<HHIIHHHHI", EXTENSIBLE, 1, RATE, RATE * 4, 4, 32, 22, 32, 4)
        + struct.pack("<H", FLOAT)
        + bytes(14),
    )
    + chunk(b"data", LEVELS.astype("<f4").tobytes()),
}


@pytest.mark.parametrize("data", CONTENTS.values(), ids=CONTENTS)
def test_every_format_gives_the_same_samples(data):
    samples, rate = decode_wav(data, "audio", LIMITS)
    assert (samples.dtype, rate) == (np.float32, RATE)
    expected = [0.0, 0.5, -0.5, -0.75] if data is CONTENTS["stereo"] else LEVELS
    np.testing.assert_allclose(samples, expected, atol=1e-6)


SILENCE = bytes(64)
REFUSED = {
    "MP3": (b"ID3\4" + bytes(40), "not a WAV file. Send WAV with PCM"),
    "FLAC": (b"fLaC" + bytes(40), "not a WAV file. Send WAV with PCM"),
    "nothing": (b"", "not a WAV file"),
    "only a header": (RIFF, "must have a chunk"),
    "no format": (RIFF + chunk(b"data", SILENCE), "must have a chunk"),
    "short format": (RIFF + chunk(b"fmt ", b"ab") + chunk(b"data", SILENCE), "has 2 bytes"),
    "truncated": (wav(SILENCE)[:-10], "chunk of 64 bytes, but only 54 bytes follow. Send the comp"),
    "huge chunk": (
        RIFF + header(PCM, 16) + b"data\xff\xff\xfe\x7f",
        "2147418111 bytes, but only 0",
    ),
    "half a sample": (wav(bytes(63)), "not a multiple of 2"),
    "no samples": (wav(b""), "the audio has no samples"),
    "mu-law": (wav(SILENCE, MULAW, 8), "the format 7 and 8 bits, which is not supported. Send WAV"),
    "12 bits": (wav(SILENCE, PCM, 12), "the format 1 and 12 bits"),
    "no channel": (wav(SILENCE, num_channels=0), "0 channels, but only 1 or 2"),
    "6 channels": (wav(SILENCE, num_channels=6), "6 channels, but only 1 or 2"),
    "rate of 0": (wav(SILENCE, rate=0), "between 4000 and 192000 Hz, but it is 0 Hz"),
    "huge rate": (wav(SILENCE, rate=2**32 - 1), "but it is 4294967295 Hz"),
    "NaN": (wav(np.array([0, np.nan], "<f4").tobytes(), FLOAT, 32), "not a finite number"),
    "infinity": (wav(np.array([0, np.inf], "<f4").tobytes(), FLOAT, 32), "not a finite number"),
    "too long": (wav(bytes(4 * RATE + 2)), "takes 2.0 seconds, but the limit is 2 seconds"),
    "too large": (wav(bytes(200_000)), "but the limit is 200000"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_file_is_refused_with_the_reason(data, message):
    with pytest.raises(RequestError, match=message):
        decode_wav(data, "audio", LIMITS)


@given(st.binary(max_size=200), st.integers(0, 60), st.binary(max_size=8))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_decoded_or_refused(content, start, patch):
    valid = wav(content)
    patched = valid[:start] + patch + valid[start + len(patch) :]
    for data in (content, RIFF + content, patched):
        try:
            samples, rate = decode_wav(data, "audio", LIMITS)
        except RequestError:
            continue
        assert len(samples) > 0
        assert np.isfinite(samples).all()
        assert np.isfinite(resample(samples, rate, RATE)).all()


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 44_101, 48_000])
def test_a_tone_stays_the_same_tone_with_another_sampling_rate(rate):
    def tone(rate: int) -> np.ndarray:
        times = np.arange(rate) / rate
        # The tone fades in and out, because resampling is inexact at the start and at the end.
        return (np.sin(2 * np.pi * 440 * times) * np.hanning(rate)).astype(np.float32)

    resampled = resample(tone(rate), rate, RATE)
    assert resampled.dtype == np.float32
    np.testing.assert_allclose(resampled, tone(RATE), atol=2e-3)


def test_long_audio_with_an_unusual_rate_is_resampled_soon():
    samples = np.zeros(2_000_000, np.float32)
    started = time.monotonic()
    assert len(resample(samples, 44_101, RATE)) == round(2_000_000 * RATE / 44_101)
    assert time.monotonic() - started < 5


DATA = base64.b64encode(pcm(LEVELS)).decode()
FORMS = {
    "OpenAI": {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
    "format of null": {"type": "input_audio", "input_audio": {"data": DATA, "format": None}},
    "vLLM": {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{DATA}"}},
    "no type": {"audio_url": {"url": f"data:audio/x-wav;base64,{DATA}"}},
    "a text": {"type": "audio_url", "audio_url": f"data:audio/WAVE;base64,{DATA}"},
}


@pytest.mark.parametrize("part", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_audio(part):
    messages, (audio_in_messages,) = split_messages([{"role": "user", "content": [part]}], LIMITS)
    assert messages[0]["content"] == [{"type": "audio"}]
    body = {"messages": [{"role": "user", "content": [part]}]}
    (url,) = take_media(body)
    assert body["messages"][0]["content"] == [{"type": "audio"}]
    audio_in_body = read_audio_url(url.decode(), "audio 1")
    for audio in (audio_in_messages, audio_in_body):
        (samples,) = read_audio([audio], RATE, LIMITS)
        np.testing.assert_allclose(samples, LEVELS, atol=1e-4)


WRONG = {
    "MP3": ({"type": "input_audio", "input_audio": {"data": DATA, "format": "mp3"}}, '"mp3", but'),
    "MP3 as a URL": ({"audio_url": {"url": "data:audio/mpeg;base64,AA=="}}, "decodes only WAV"),
    "a remote URL": ({"audio_url": {"url": "https://a/b.wav"}}, "no remote files and decodes only"),
    "no audio": ({"type": "input_audio", "input_audio": {}}, "has no audio. Send WAV"),
    "a number": ({"type": "input_audio", "input_audio": 3}, "has no audio. Send WAV"),
    "no data": ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "no audio"),
    "an array without a rate": (
        {"type": "audio", "audio": LEVELS},
        "the sampling_rate of an array must be an integer",
    ),
}


@pytest.mark.parametrize(("part", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_part_is_refused_with_a_remedy(part, message):
    with pytest.raises(RequestError, match=message):
        split_messages([{"role": "user", "content": [part]}], LIMITS)


def test_the_number_and_the_duration_of_all_audio_together_are_limited():
    with pytest.raises(RequestError, match="3 audio files, but the limit is 2"):
        split_messages([{"role": "user", "content": [FORMS["OpenAI"]] * 3}], LIMITS)
    _, audios = split_messages(audio_chat([noise(1, 1.2), noise(2, 1.2)], "hello"), LIMITS)
    with pytest.raises(RequestError, match=r"takes 2\.4 seconds, but the limit is 2 seconds"):
        read_audio(audios, RATE, LIMITS)


@pytest.mark.parametrize(
    "content",
    [np.zeros((2, 8)), np.array([np.nan] * 8), np.array(["a", "b"]), np.array(0.5)],
    ids=["two axes", "not finite", "texts", "no axis"],
)
def test_a_wrong_array_is_refused(content):
    part = {"type": "audio", "audio": content, "sampling_rate": RATE}
    _, audios = split_messages([{"role": "user", "content": [part]}], LIMITS)
    with pytest.raises(RequestError, match="one axis and finite numbers"):
        read_audio(audios, RATE, LIMITS)


def test_the_process_that_reads_requests_imports_no_torch():
    module = "nereid_backend.serving.tokenizer.image_prompts"
    program = f"import sys, {module}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


def test_a_model_that_ignores_audio_refuses_audio():
    logits = torch.arange(20.0)[:, None]
    _check_uses_audio(ReferenceLogits([], logits, block_size=4))
    with pytest.raises(UnfitError, match="do not depend on the audio"):
        _check_uses_audio(ReferenceLogits([], torch.zeros_like(logits), block_size=4))


def test_tokens_equal_those_of_generate(tmp_path):
    """The engine and transformers generate equal tokens for a model with only an audio encoder."""
    folder, chats, expected, depends_on_audio = image_archs.build("glmasr", tmp_path, "audio")
    assert depends_on_audio
    assert may_accept_media(str(folder))
    engine = open_engine(folder, block_size=4, max_num_batched_tokens=32)
    try:
        assert (engine._parts.images.name, engine._parts.images.kind) == ("packed", "audio")
        assert image_archs._mixed(engine, chats) == expected
        engine.check()

        # The features of all audio inputs are cached, so the engine runs no audio encoder.
        num_encodings = engine.stats().num_image_encodings
        assert image_archs._cached(engine, chats) == expected
        assert engine.stats().num_image_encodings == num_encodings

        reason = r"images are refused, because .* no image processor"
        with pytest.raises(RequestError, match=reason):
            engine.image_prompt(image_archs.make_chats()[0])
    finally:
        engine.close()
