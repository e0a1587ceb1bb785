"""Tests of piecewise CUDA graphs for steps with prefills.

The parts of the model between the attention calls are captured and replayed.
"""

import pytest
import torch
from backend.gpu.engines import run, sizes_of_engine
from backend.gpu.recorded import CaptureError, record_pieces
from nereid_backend import SamplingParams
from nereid_backend.paths.cuda_graphs.piecewise_graphs import PiecewiseGraphs


def use_pieces(engine, capture=record_pieces, counts=(16, 32)):
    """Make an engine replay the pieces of its steps.

    `counts` contains the numbers of tokens for which graphs are captured.

    Returns:
        The graphs and the list of reported lines.
    """
    reported = []
    path = engine._parts.runner._path
    path.pieces = path.piecewise_graphs(capture, sizes_of_engine(engine), reported.append)
    path.pieces.capture_all(counts)
    return path.pieces, reported


def poison(engine):
    """Overwrite the inputs and outputs of the graphs with wrong numbers."""
    graphs = engine._parts.runner._path.pieces
    for captured in graphs._graphs.values():
        static = captured.static
        static._inputs.copy_(torch.tensor([[7], [5], [2]]).expand_as(static._inputs))
        static._logits_index.fill_(1)
    graphs._logits.fill_(float("nan"))
    for query, out in graphs._buffers.values():
        query.fill_(float("nan"))
        out.fill_(9.0)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_replayed_pieces_give_the_tokens_of_steps_without_graphs(name, engine_of):
    expected = run(engine_of(name), 3, count=6)
    engine = engine_of(name)
    graphs, reported = use_pieces(engine)
    assert run(engine, 3, count=6, poisoned=poison) == expected
    assert reported == []
    assert graphs.num_captures == 2
    assert graphs.num_replays > 20


def test_steps_with_more_tokens_or_logits_than_were_captured_run_without_graphs(engine_of):
    engine = engine_of("llama")
    graphs, _ = use_pieces(engine, counts=(16,))
    engine.generate([[5] * 17], SamplingParams(max_tokens=1))
    assert graphs.num_replays == 0
    static = graphs._graphs[16].static
    static.num_logits = 2
    engine.generate([[5] * 3], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert graphs.num_replays == 0
    engine.generate([[5] * 16], SamplingParams(max_tokens=1))
    assert graphs.num_replays == 1


def test_a_step_that_cannot_be_captured_is_reported_and_runs_without_graphs(engine_of):
    def fails(work):
        raise CaptureError("a library waits\nfor the device")

    engine = engine_of("llama")
    graphs, reported = use_pieces(engine, fails)
    assert graphs.failure == "a library waits"
    assert len(reported) == 1
    assert reported[0].endswith("captured: a library waits")
    engine.generate([[5] * 3], SamplingParams(max_tokens=2))
    assert graphs.num_replays == 0


def test_a_replay_whose_logits_differ_from_its_step_is_reported(engine_of):
    def wrong(work):
        work(lambda between: between())
        return lambda: None

    _, reported = use_pieces(engine_of("llama"), wrong)
    assert "differ from the logits of the same step" in reported[0]


def test_nothing_is_read_from_the_device_while_pieces_are_captured(engine_of, monkeypatch):
    attend = PiecewiseGraphs.buffers

    def reads(self, spec, like):
        like.sum().item()
        return attend(self, spec, like)

    engine = engine_of("llama")
    monkeypatch.setattr(PiecewiseGraphs, "buffers", reads)
    graphs, reported = use_pieces(engine)
    assert graphs.failure is not None
    assert "while a stream is captured" in reported[0]
