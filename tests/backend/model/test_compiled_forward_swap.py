import time
from unittest.mock import Mock

import pytest
import torch
from backend.tiny_models import VOCAB_SIZE
from nereid_backend import ConfigError, Engine, EngineConfig, SamplingParams
from nereid_backend.attention.cpu.compile_kernels import KernelBuildError
from nereid_backend.linear import native_linear
from nereid_backend.model import compiled_forward_swap
from nereid_backend.paths.compiled_forward import library_files
from nereid_backend.paths.compiled_forward.library_files import TraceError
from nereid_backend.paths.compiled_forward.load_library import CompiledForward
from nereid_backend.paths.model_call import UnfitError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = [5, 9, 11, 4]


class Compilation:
    """A fake compilation. The test sets its outcome.

    Attributes:
        last: the compilation that was started last.
        outcome: None while the compilation runs, "" if it has succeeded, or the reason why it has
            failed.
    """

    last: "Compilation"

    def __init__(self, message, folder):
        self.message = message
        self.folder = folder
        self.outcome = None
        self.is_closed = False
        Compilation.last = self

    def close(self):
        self.is_closed = True


@pytest.fixture(autouse=True)
def compilation(request, tmp_path, monkeypatch):
    """Let the engine compile models of every size, and start with an empty cache of libraries."""
    monkeypatch.setattr(library_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiled_forward_swap, "MIN_WEIGHTS_BYTES", 0)
    if not request.node.get_closest_marker("long"):
        monkeypatch.setattr(compiled_forward_swap, "BackgroundCompilation", Compilation)


def use_library(monkeypatch, run):
    """Let every library compute the logits of a step with `run(model, batch, attention)`.

    Returns:
        A list to which each computed step adds its number of tokens.
    """
    numbers_of_tokens = []

    class Library(CompiledForward):
        def __init__(self, model):
            super().__init__(run)
            self._model = model

        def __call__(self, batch, attention):
            numbers_of_tokens.append(len(batch.input_ids[0]))
            return run(self._model, batch, attention)

    monkeypatch.setattr(compiled_forward_swap, "load_library", lambda model, _: Library(model))
    return numbers_of_tokens


@pytest.fixture
def engine(checkpoint):
    """An engine with an additional attribute `lines`, which contains the progress messages."""
    lines = []
    config = EngineConfig(str(checkpoint("llama")), kv_cache_memory="4MiB", max_num_seqs=4)
    engine = Engine(config, progress=lines.append)
    engine.lines = lines
    yield engine
    engine.close()


def answer(engine):
    """Return the tokens of the greedy answer to `PROMPT`."""
    return engine.generate([PROMPT], GREEDY)[0].outputs[0].token_ids


def own_code(engine):
    """Return a function that computes a step with the model's own code."""
    path = engine._parts.runner._path
    return lambda _, batch, attention: path._run_own_code(batch, attention)


def test_the_engine_swaps_in_a_checked_library_between_two_steps(engine, monkeypatch, caplog):
    expected = answer(engine)
    steps_of_library = use_library(monkeypatch, own_code(engine))
    assert not engine.is_swapping()

    engine.add_request("a", PROMPT, GREEDY)
    tokens = []
    while engine.has_work():
        for update in engine.step():
            tokens += update.new_token_ids
        if len(tokens) == 3:
            assert steps_of_library == []
            Compilation.last.outcome = ""
            assert engine.is_swapping()

    assert tokens == expected
    assert not engine.is_swapping()
    assert "the forward pass is compiled and used from now on" in engine.lines[-1]
    assert caplog.text == ""
    # The check computes three prompts in chunks of at most 8 tokens, between the engine's own
    # steps.
    assert max(steps_of_library) == 8
    assert engine._parts.runner._path._compiled is not None


def test_an_engine_without_requests_checks_the_library_when_it_is_called(engine, monkeypatch):
    steps_of_library = use_library(monkeypatch, own_code(engine))
    Compilation.last.outcome = ""
    num_calls = 0
    while engine.is_swapping():
        assert not engine.has_work()
        assert engine.step() == []
        num_calls += 1

    # Each call of `engine.step` computes at most one step of the check.
    num_checked_steps = len(steps_of_library)
    assert num_checked_steps <= num_calls
    assert engine._parts.runner._path._compiled is not None
    engine.generate([PROMPT], GREEDY)
    assert len(steps_of_library) > num_checked_steps


def zeros(_, batch, __):
    return torch.zeros(batch.num_logits, VOCAB_SIZE)


def crash(*_):
    raise ValueError("a broken library\nand its stack")


@pytest.mark.parametrize(
    ("outcome", "run", "reason"),
    [
        ("the compilation was killed", None, "the compilation was killed"),
        ("", zeros, "its logits differ from the logits of the unmodified model"),
        ("", crash, "a broken library"),
    ],
)
def test_a_failure_is_logged_once_and_serving_continues(
    engine, monkeypatch, caplog, outcome, run, reason
):
    expected = answer(engine)
    use_library(monkeypatch, run)
    Compilation.last.outcome = outcome

    assert answer(engine) == expected

    module = compiled_forward_swap.__name__
    [record] = [record for record in caplog.records if record.name == module]
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert message.startswith(f"The forward pass is not compiled: {reason}")
    assert "\n" not in message
    assert not engine.is_swapping()


def test_a_missing_library_is_a_failure(engine, caplog):
    Compilation.last.outcome = ""
    engine.generate([PROMPT], GREEDY)
    assert "The forward pass is not compiled: " in caplog.text


def test_the_start_names_the_forward_pass_in_use(engine):
    assert "the model's own code computes the forward pass, until" in engine.lines[-1]


def test_close_ends_the_compilation(engine):
    engine.close()
    assert Compilation.last.is_closed


def test_an_engine_that_cannot_start_ends_the_compilation(checkpoint):
    with pytest.raises(ConfigError):
        Engine(EngineConfig(str(checkpoint("llama")), lora_adapters={"a": "/missing"}))
    assert Compilation.last.is_closed


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (
            "find_compiler",
            KernelBuildError("no C++ compiler was found"),
            "no C++ compiler was found",
        ),
        (
            "available_memory",
            2**30,
            "only 1.0 GiB of memory are free, but a compilation may need 3.0 GiB",
        ),
        ("BackgroundCompilation", OSError("too many processes"), "too many processes"),
        ("pack_skeleton", UnfitError("the model has a lambda"), "the model has a lambda"),
    ],
)
def test_a_machine_that_cannot_compile_says_so_in_one_line(
    checkpoint, monkeypatch, name, value, reason
):
    def replacement(*_):
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(compiled_forward_swap, name, replacement)
    lines = []
    engine = Engine(EngineConfig(str(checkpoint("llama")), kv_cache_memory="4MiB"), lines.append)
    engine.close()
    assert lines[-1] == f"the forward pass is not compiled, because {reason}"


def test_a_model_that_cannot_be_traced_is_not_compiled_again(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(
        compiled_forward_swap, "library_folder", lambda *_, **__: tmp_path / "library"
    )
    library_files.write_trace_error(tmp_path / "library", TraceError("odd code"))
    lines = []
    Engine(EngineConfig(str(checkpoint("llama")), kv_cache_memory="4MiB"), lines.append).close()
    assert lines[-1].startswith(
        "the forward pass is not compiled, because an earlier attempt failed (odd code). To try"
    )


@pytest.mark.parametrize(
    ("settings", "min_bytes"),
    [({"compile_forward": False}, 0), ({"compile_forward": "auto"}, 10**9)],
)
def test_nothing_is_compiled_for_small_models_or_if_it_is_turned_off(
    checkpoint, monkeypatch, settings, min_bytes
):
    monkeypatch.setattr(compiled_forward_swap, "MIN_WEIGHTS_BYTES", min_bytes)
    monkeypatch.delattr(Compilation, "last", raising=False)
    lines = []
    Engine(EngineConfig(str(checkpoint("llama")), **settings), lines.append).close()
    assert not hasattr(Compilation, "last")
    assert not any("compil" in line for line in lines)


def test_a_library_on_disk_is_used_from_the_start(checkpoint, monkeypatch):
    use_compiled_forward = Mock()
    monkeypatch.setattr(compiled_forward_swap, "has_library", lambda _: True)
    monkeypatch.setattr(compiled_forward_swap, "use_compiled_forward", use_compiled_forward)
    engine = Engine(EngineConfig(str(checkpoint("llama")), kv_cache_memory="4MiB"))
    engine.close()
    use_compiled_forward.assert_called_once()
    assert not engine.is_swapping()


def test_a_library_whose_checks_fail_is_not_loaded_again(tmp_path):
    library = CompiledForward(zeros, tmp_path)
    for _ in range(2):
        library_files.begin_check(tmp_path)
    library.confirm()  # The number of failed checks starts again from zero.
    for _ in range(3):
        library_files.begin_check(tmp_path)
    with pytest.raises(UnfitError, match=f"the last 3 checks .* in {tmp_path} did not succeed"):
        library_files.begin_check(tmp_path)


def test_several_engines_may_check_a_library_at_the_same_time(tmp_path, monkeypatch):
    # This file contains one byte for each recorded check that has failed or still runs.
    records = tmp_path / "failed_checks"
    # Each engine has its own process, and thus its own dict of running checks.
    checks_of_engines = [{} for _ in range(5)]
    for checks in checks_of_engines:
        monkeypatch.setattr(library_files, "_running_checks", checks)
        library_files.begin_check(tmp_path)
    assert records.stat().st_size == 1

    # If this engine crashed, its file would be closed, too.
    checks_of_engines[0].pop(tmp_path).close()
    library_files.begin_check(tmp_path)
    assert records.stat().st_size == 2

    library_files.confirm_check(tmp_path)
    assert not records.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [("auto", "auto"), ("true", True), ("1", True), ("False", False), ("", "auto")],
)
def test_the_setting_is_read_from_text(checkpoint, text, value):
    settings = {"model": str(checkpoint("llama")), "compile_forward": text}
    assert EngineConfig.from_settings(settings).compile_forward == value


def test_another_value_of_the_setting_is_refused(checkpoint):
    expected = "compile_forward: the value must be true, false or auto, but it is 'always'."
    with pytest.raises(ConfigError, match=expected):
        EngineConfig(str(checkpoint("llama")), compile_forward="always")


@pytest.mark.long  # Compiling takes half a minute.
@pytest.mark.skipif(
    not native_linear.can_pack(torch.ones(2, 2)), reason="no compiler, or no vectors for kernels"
)
def test_another_process_compiles_the_model_and_the_next_engine_loads_it(engine, checkpoint):
    expected = answer(engine)
    deadline = time.monotonic() + 300
    while engine._parts.runner._path._compiled is None and time.monotonic() < deadline:
        assert answer(engine) == expected
    assert engine._parts.runner._path._compiled is not None
    assert answer(engine) == expected

    lines = []
    next_engine = Engine(
        EngineConfig(str(checkpoint("llama")), kv_cache_memory="4MiB"), lines.append
    )
    next_engine.close()
    assert lines[-1] == "the forward pass is compiled"
