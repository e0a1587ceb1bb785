"""Tests of the report of a load test: tables, CSV files, an HTML page and the exit code."""

import csv
import re

import pytest

from loadtest.client.reply import Reply
from loadtest.load import load, records, report_page, report_tables
from loadtest.load.check_reply import Fault
from loadtest.load.load_requests import chat
from loadtest.load.prompts import Question
from loadtest.load.records import Record
from loadtest.load.report_tables import Phase
from loadtest.server.gauges import Sample


def made(scenario="Chat", outcome="ok", **fields):
    values = {
        "endpoint": "openai",
        "started": 100.0,
        "late_s": 0.0,
        "ttft_s": 0.1,
        "gaps_s": [0.02, 0.04],
        "e2e_s": 0.5,
        "num_tokens": 7,
        "is_stream": True,
    }
    return Record(scenario=scenario, outcome=outcome, **(values | fields))


def phase(*requests, **fields):
    samples = [
        Sample(100.0 + at, {"num_requests": at, "generation_tokens_total": 10.0 * at})
        for at in range(5)
    ]
    return Phase("model", "demo", 10.0, list(requests), samples, **fields)


LOST = {"outcome": "lost", "faults": ["lost: 03.007,"]}


def cells(phase, scenario):
    [line] = [line for line in report_tables.rows(phase) if line[0] == scenario]
    return dict(zip(report_tables.unique_columns(), line, strict=True))


def test_a_row_contains_the_measurements_of_its_scenario():
    found = cells(
        phase(made(), made(), made("Other", ttft_s=9.0), made(outcome="cancelled")), "Chat"
    )
    assert found["requests"] == "3"
    assert found["req/s"] == "0.3"
    assert found["tokens/s"] == "2"
    assert found["TTFT p50"] == found["TTFT p99"] == "100"
    assert found["ITL p50"] == "30"
    assert found["per token"] == "10"
    assert found["e2e p50"] == "500"
    assert (found["cancelled"], found["failed"]) == ("1", "0")


def test_a_failed_request_is_counted_and_its_times_are_not():
    found = cells(phase(made(), made(ttft_s=9.0, e2e_s=9.0, **LOST)), "all")
    assert (found["requests"], found["failed"]) == ("2", "1")
    assert found["e2e p99"] == "500"


def test_answers_in_one_piece_have_no_time_to_first_token():
    found = cells(phase(made(is_stream=False, gaps_s=[], ttft_s=0.4)), "Chat")
    assert found["TTFT p50"] == found["ITL p50"] == found["per token"] == "-"


@pytest.mark.parametrize(
    "wrong",
    [phase(made(), made(**LOST)), phase(made(), broken=["still in use: num_requests 1"])],
    ids=["request", "leak"],
)
def test_every_fault_fails_the_run_and_is_listed(wrong, capsys):
    assert load.verdict([phase(made()), wrong]) == 1
    said = capsys.readouterr().out
    assert re.search(r"FAILED model: .*(lost: 03\.007,|still in use: num_requests 1)", said)
    assert "1 failures" in said


def test_cancelled_and_rejected_requests_do_not_fail_the_run(capsys):
    fine = phase(made(), made(outcome="cancelled"), made(outcome="rejected"))
    assert load.verdict([fine]) == 0
    assert capsys.readouterr().out == "There were no failures.\n"


def test_the_page_needs_no_other_file_and_shows_what_failed():
    page = report_page.page([phase(made(), made("<b>", **LOST))], "Load", ["a machine"])
    assert not re.search(r"""(src|href)=(?!["']?data:)|@import|url\(""", page)
    assert "data:image/png;base64," in page
    assert "lost: 03.007," in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_a_phase_without_requests_can_be_shown():
    empty = Phase("model", "demo", 1.0, broken=["the load generator ended with 2"])
    assert "the load generator ended with 2" in report_page.page([empty], "Load", [])
    assert "## model" in report_tables.text([empty])


def test_csv_files_hold_requests_scenarios_and_gauges(tmp_path):
    report_tables.write_csv(tmp_path, [phase(made(), made(**LOST))])
    tables = {
        path.stem: list(csv.DictReader(path.read_text().splitlines()))
        for path in tmp_path.glob("*.csv")
    }
    assert [row["outcome"] for row in tables["requests"]] == ["ok", "lost"]
    assert tables["requests"][0]["ttft_s"] == "0.1"
    assert tables["requests"][1]["faults"] == "['lost: 03.007,']"
    assert [row["scenario"] for row in tables["scenarios"]] == ["Chat", "all"]
    assert [row["num_requests"] for row in tables["gauges"]] == ["0", "1", "2", "3", "4"]


def test_records_that_are_read_from_their_file_are_unchanged(tmp_path):
    said = Reply(status=200, num_tokens=2, end="whole")
    said.add_text("a")
    said.add_text("b")
    said.ended = said.times[-1]
    kept = [
        records.record("Chat", chat(Question("Hello!"), 2), said, []),
        records.record("Chat", chat(Question("Hello!"), 2), said, [Fault("lost", "a")]),
    ]
    records.write(tmp_path / "kept", kept)
    assert records.read(tmp_path / "kept") == kept
    assert [one.outcome for one in kept] == ["ok", "lost"]
    assert len(kept[0].gaps_s) == 1
