from loadtest.bench import bench_window_groups
from loadtest.bench.bench_window_groups import SHAPES


def test_groups_need_less_memory_for_every_model(capsys):
    bench_window_groups.main([])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(SHAPES)
    for row in rows:
        cells = row[24:].split()
        (before, unit), requests_before = cells[:2], int(cells[2])
        (after, unit_after), requests_after = cells[-3:-1], int(cells[-1])
        assert unit == unit_after == "KiB"
        assert float(after) < float(before) * 0.6
        assert requests_after > requests_before


def test_short_requests_need_one_group(capsys):
    bench_window_groups.main(["--tokens", "100"])
    assert "1 of 34 layers" in capsys.readouterr().out
