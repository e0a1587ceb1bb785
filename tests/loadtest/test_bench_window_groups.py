from loadtest.bench import bench_window_groups
from loadtest.bench.bench_window_groups import SHAPES


def test_groups_need_less_memory_for_every_model(capsys):
    bench_window_groups.main([])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[4:]]
    assert len(rows) == len(SHAPES)
    for _, before, requests_before, _, after, requests_after in rows:
        (kib_before, unit_before), (kib_after, unit_after) = before.split(), after.split()
        assert unit_before == unit_after == "KiB"
        assert float(kib_after) < float(kib_before) * 0.6
        assert int(requests_after) > int(requests_before)


def test_short_requests_need_one_group(capsys):
    bench_window_groups.main(["--tokens", "100"])
    assert "1 of 34 layers" in capsys.readouterr().out
