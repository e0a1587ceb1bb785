import pytest
from nereid_client.errors import BackendError, to_api_error


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ("9 requests wait; the limit is 9 (max_num_waiting); try again in 17 s", "17"),
        ("the engine is being started again; try again in 4 s", "4"),
        ("Server is stopping", "1"),
    ],
)
def test_a_refusal_says_in_its_header_when_to_come_back(message, seconds):
    answer = to_api_error(BackendError("UNAVAILABLE", message))
    assert (answer.status, answer.headers) == (503, {"Retry-After": seconds})


def test_a_request_whose_time_is_over_is_told_so():
    answer = to_api_error(BackendError("DEADLINE_EXCEEDED", "not finished after 2 s (timeout)"))
    assert (answer.status, answer.code, answer.headers) == (504, "timeout", {})
