import pytest

from loadtest.bench import bench_context
from loadtest.bench.bench_context import Measurement, measure, open_engine, report, save_model


def test_a_long_prompt_delays_another_request_by_at_most_one_chunk(tmp_path):
    save_model(tmp_path, num_layers=1, max_length=2048)
    engine = open_engine(str(tmp_path), 2048, num_threads=1)
    found = measure(engine, 2000)
    assert found.num_missed == 0
    assert 2000 / 16 <= found.num_blocks <= 2000 / 16 + 2
    assert found.chunk_s < found.prefill_s
    engine.close()


def test_the_table_compares_times_with_theory():
    def quadratic(n):
        prefill_s = n * (1e-4 + 1e-8 * n)
        return Measurement(n, prefill_s, 0.1, 1e-3 + 1e-7 * n, n // 16, 0)

    rows = report([quadratic(n) for n in (1000, 5000, 9000)], 1024).splitlines()[2:]
    ratios = [[cell.strip() for cell in row.split("|")[-3:-1]] for row in rows]
    assert ratios == [["1.00", "1.00"]] * 3


def test_a_wrong_length_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_context.main(["--lengths", "long"])
    assert "invalid int value" in capsys.readouterr().err
