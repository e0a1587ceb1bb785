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
    """Make an engine replay piecewise graphs.

    `counts` contains the numbers of tokens for which graphs are captured.

    Returns:
        The graphs, and the list of the lines that the graphs report.
    """
    reported_lines = []
    path = engine._parts.runner._path
    path.pieces = path.piecewise_graphs(capture, sizes_of_engine(engine), reported_lines.append)
    path.pieces.capture_all(counts)
    return path.pieces, reported_lines


def poison(engine):
    """Overwrite the inputs and outputs of the graphs with wrong numbers."""
    graphs = engine._parts.runner._path.pieces
    # The rows of the inputs are: token ids, positions, slots.
    wrong_inputs = torch.tensor([[7], [5], [2]])
    for captured in graphs._graphs.values():
        captured.static._inputs.copy_(wrong_inputs.expand_as(captured.static._inputs))
        captured.static._logits_index.fill_(1)
    graphs._logits.fill_(float("nan"))
    for query, out in graphs._buffers.values():
        query.fill_(float("nan"))
        out.fill_(9.0)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_replayed_pieces_give_the_tokens_of_steps_without_graphs(name, engine_of):
    expected = run(engine_of(name), seed=3, num_requests=6)
    engine = engine_of(name)
    graphs, reported_lines = use_pieces(engine)
    assert run(engine, seed=3, num_requests=6, before_step=poison) == expected
    assert reported_lines == []
    assert graphs.num_captures == 2
    assert graphs.num_replays > 20


def test_steps_with_more_tokens_or_logits_than_were_captured_run_without_graphs(engine_of):
    engine = engine_of("llama")
    graphs, _ = use_pieces(engine, counts=(16,))

    engine.generate([[5] * 17], SamplingParams(max_tokens=1))
    assert graphs.num_replays == 0

    # The graph has memory for two rows of logits. A prompt of three tokens requires more rows if
    # the request asks for the log-probabilities of the prompt's tokens.
    graphs._graphs[16].static.num_logits = 2
    engine.generate([[5] * 3], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert graphs.num_replays == 0

    engine.generate([[5] * 16], SamplingParams(max_tokens=1))
    assert graphs.num_replays == 1


def test_a_step_that_cannot_be_captured_is_reported_and_runs_without_graphs(engine_of):
    def failing_capture(work):
        raise CaptureError("a library waits\nfor the device")

    engine = engine_of("llama")
    graphs, reported_lines = use_pieces(engine, failing_capture)
    assert graphs.failure == "a library waits"
    assert len(reported_lines) == 1
    assert reported_lines[0].endswith("captured: a library waits")
    engine.generate([[5] * 3], SamplingParams(max_tokens=2))
    assert graphs.num_replays == 0


def test_a_replay_whose_logits_differ_from_its_step_is_reported(engine_of):
    def capture_empty_replay(work):
        work(lambda between: between())
        return lambda: None

    _, reported_lines = use_pieces(engine_of("llama"), capture_empty_replay)
    assert "differ from the logits of the same step" in reported_lines[0]


def test_nothing_is_read_from_the_device_while_pieces_are_captured(engine_of, monkeypatch):
    buffers = PiecewiseGraphs.buffers

    def buffers_with_reading(self, spec, like):
        like.sum().item()
        return buffers(self, spec, like)

    engine = engine_of("llama")
    monkeypatch.setattr(PiecewiseGraphs, "buffers", buffers_with_reading)
    graphs, reported_lines = use_pieces(engine)
    assert graphs.failure is not None
    assert "while a stream is captured" in reported_lines[0]
