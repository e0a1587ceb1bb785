"""Tests of a real server in which forward passes fail, hang or return NaN."""

import asyncio
import dataclasses

import pytest

from loadtest.faults import fault_rows
from loadtest.faults.engine_faults import faults, make_asker, measure_one, serve

pytestmark = pytest.mark.triton

HARMLESS = ("pooling worker: out of memory once",)
"""Faults that no request may notice: the server repeats the failed batch one request at a time."""
MASK_FAULT = "engine: an exception in a grammar's mask"
"""If a mask for the next token fails, the server computes the masks again, one by one. If a mask
after a draft token fails, the request with the grammar ends with an error."""
EXPECTED = {
    "engine: out of memory in one step": [],
    "engine: out of memory in 3 steps in a row": ["engine"],
    "engine: a CUDA error": ["engine"],
    "engine: a NaN in one request's logits": [],
    MASK_FAULT: [],
    "engine: an exception in a grammar's step": [],
    "pooling worker: out of memory once": [],
    "pooling worker: a CUDA error": ["worker"],
    "pooling worker: hangs": ["worker"],
}
"""Name of a fault -> the processes that the server must replace after the fault."""
REPEATED = ("engine: out of memory in 3 steps in a row", "pooling worker: a CUDA error")
"""Faults that are tested only in long runs.

Another fault in `EXPECTED` also replaces the same process, and test_engine_faults.py tests how the
server detects these faults.
"""
ALONE = {
    "engine: a NaN in one request's logits": "completion with the token",
    "engine: an exception in a grammar's step": "structured stream",
}
"""Name of a fault -> the kind of the only request that may fail because of the fault."""


def are_expected(failed_kinds, name):
    """Return whether a fault may let requests of these kinds fail, and no others."""
    if name == MASK_FAULT:
        return failed_kinds <= {"structured stream"}
    if name in ALONE:
        return failed_kinds == {ALONE[name]}
    return bool(failed_kinds) == (name not in HARMLESS)


@pytest.fixture(scope="module")
def serving():
    with serve() as running:
        yield running


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in REPEATED else ()) for name in EXPECTED],
)
def test_a_fault_fails_only_some_requests_and_the_server_recovers(serving, name, monkeypatch):
    monkeypatch.setattr(fault_rows, "_RECOVERY_LIMIT_S", 400.0)
    fault = next(fault for fault in faults() if fault.name.startswith(name))
    if "hangs" not in name:  # all other faults take effect in the next forward pass
        fault = dataclasses.replace(fault, settled_s=2.0)

    async def measure():
        asker = make_asker(serving, limit_s=240.0)
        try:
            return await measure_one(serving, asker, fault, num_texts=400, num_tokens=400)
        finally:
            await asker.close()

    row = asyncio.run(measure())

    # On a busy machine, requests may end late. The longer limit still detects requests that never
    # end.
    row_with_longer_limit = dataclasses.replace(row, fault=dataclasses.replace(fault, limit_s=50.0))
    assert not row_with_longer_limit.is_broken, row.cells()
    assert [role.split()[-1] for role in row.replaced] == EXPECTED[name], row.cells()
    failed_kinds = {outcome.ask.kind for outcome in row.failed}
    assert are_expected(failed_kinds, name), row.cells()
    kind_of_other_process = "stream" if fault.role == "worker" else "embedding"
    assert kind_of_other_process not in failed_kinds, row.cells()
    assert all(outcome.detail for outcome in row.failed), row.cells()
