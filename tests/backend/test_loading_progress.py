from nereid_backend import loading_progress
from nereid_backend.loading_progress import report_items


def test_a_slow_loop_is_reported(monkeypatch):
    times = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(loading_progress.time, "monotonic", lambda: next(times))
    lines = []
    assert list(report_items("abcd", "reading weights", lines.append)) == ["a", "b", "c", "d"]
    assert lines == ["reading weights: 1 of 4", "reading weights: 3 of 4"]
