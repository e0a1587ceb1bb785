from types import SimpleNamespace

import pytest
from nereid_backend import CapacityError
from nereid_backend.serving.executor import stream_admission
from nereid_backend.serving.executor.stream_admission import StreamAdmission
from nereid_backend.serving.serving_settings import ServingSettings
from nereid_backend.serving.wire import RequestEnvelope


def test_waiting_images_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    # Images may use a quarter of the available memory: 1 MiB.
    monkeypatch.setattr(stream_admission, "available_memory", lambda: 4 * 2**20)
    feedback = SimpleNamespace(
        acquire=lambda count: tuple(range(count)), release=lambda slots: None
    )
    admission = StreamAdmission(ServingSettings(str(tmp_path)), 4096, feedback)

    def open_stream(num_image_bytes):
        envelope = RequestEnvelope(b"", n=1, context=b"", images=bytes(num_image_bytes))
        return admission.open(envelope, num_tokens=3, sender=None)

    waiting = open_stream(2**20 - 2048)
    open_stream(0)
    with pytest.raises(
        CapacityError, match=r"images of 1022\.0 KiB are waiting.*limit is 1\.0 MiB"
    ):
        open_stream(4096)
    admission.note_start(waiting, 0.0)  # A started request does not wait any more.
    open_stream(4096)
