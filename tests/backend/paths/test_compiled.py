import dataclasses
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from backend.exactness import MAX_TOKENS, open_engine
from backend.lora.mixed_adapters import adapters, answer_mixed, references, write_both
from backend.tiny_models import BY_NAME, VOCAB_SIZE, Family
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.attention.cpu.cpu_library import KernelTimes
from nereid_backend.linear import native_linear
from nereid_backend.model import accelerate_path
from nereid_backend.paths.compiled_forward import build_library, library_files, load_library
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

pytestmark = [
    pytest.mark.skipif(
        not native_linear.can_pack(torch.ones(2, 2)), reason="no compiler, or no 512-bit vectors"
    ),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 11, 4], [7], list(range(3, 60))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that replaces the machine's cache of compiled libraries."""
    monkeypatch.setattr(library_files, "cache_folder", lambda: tmp_path)
    return tmp_path


def answers(path, **settings):
    """Answer the prompts together and one by one. Return the tokens and the progress messages."""
    progress_lines = []
    config = EngineConfig(
        str(path), kv_cache_memory="4MiB", max_num_seqs=4, num_threads=1, **settings
    )
    engine = Engine(config, progress=progress_lines.append)
    try:
        outputs = engine.generate(PROMPTS, GREEDY)
        outputs += [engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
        tokens = [output.outputs[0].token_ids for output in outputs]
        return tokens, "\n".join(progress_lines)
    finally:
        engine.close()


# gpt_oss has attention sinks and experts, and gemma2 has windows and soft caps. Compiling each of
# their libraries takes half a minute, so `make test` compiles only a model with one layer (see the
# fixture `library`). The libraries stay in the cache of this machine. The name of a library depends
# on everything that the library was built from.
@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma2"])
def test_a_compiled_model_gives_the_tokens_of_the_model_as_it_is(checkpoint, architecture):
    path = checkpoint(architecture)
    expected, _ = answers(path)
    tokens, progress = answers(path, compile_forward=True)
    assert "the forward pass is compiled" in progress
    assert tokens == expected


@pytest.fixture(scope="module")
def one_layer():
    """A family of models with one layer. They compile twice as fast as models with two layers."""
    llama = BY_NAME["llama"]
    return dataclasses.replace(llama, extra={**llama.extra, "num_hidden_layers": 1})


@pytest.fixture(scope="module")
def library(one_layer, tmp_path_factory):
    """The folder of a checkpoint, and a folder with the compiled library of this checkpoint."""
    path = one_layer.save(tmp_path_factory.mktemp("one-layer"))
    folder = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(library_files, "cache_folder", lambda: folder)
        _, progress = answers(path, compile_forward=True)
    assert "compiling" in progress
    assert len(list((folder / "compiled").iterdir())) == 1
    return path, folder


def test_a_library_is_stored_and_used_for_another_checkpoint_of_the_same_shape(
    library, tmp_path, monkeypatch
):
    path, folder = library
    monkeypatch.setattr(library_files, "cache_folder", lambda: folder)
    stored_libraries = list((folder / "compiled").iterdir())
    other_checkpoint = tmp_path / "other"
    torch.manual_seed(77)
    model = AutoModelForCausalLM.from_pretrained(path)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(other_checkpoint)
    expected, _ = answers(other_checkpoint)

    tokens, progress = answers(other_checkpoint, compile_forward=True)

    assert "compiling" not in progress
    assert "the forward pass is compiled" in progress
    assert tokens == expected
    assert list((folder / "compiled").iterdir()) == stored_libraries


def test_a_compiled_library_calls_the_kernels_without_python(library, monkeypatch):
    path, folder = library
    monkeypatch.setattr(library_files, "cache_folder", lambda: folder)
    engine = Engine(EngineConfig(str(path), kv_cache_memory="4MiB", compile_forward=True))
    try:
        kernel_times = engine._parts.runner._path._cache.kernel_times = KernelTimes()
        engine.generate(PROMPTS, GREEDY)
    finally:
        engine.close()
    # The compiled library calls the kernels as C functions, which add their times to
    # `kernel_times`. Calls through Python operators add no times.
    assert kernel_times.linear_ns > 0
    assert kernel_times.attention_ns > 0


def test_a_compiled_forward_pass_computes_steps_with_adapters(
    library, one_layer, tmp_path, monkeypatch
):
    _, folder = library
    monkeypatch.setattr(library_files, "cache_folder", lambda: folder)
    expected = references(tmp_path, write_both(tmp_path, one_layer.make()))
    engine = open_engine(
        tmp_path / "0", lora_adapters=adapters(tmp_path), block_size=16, compile_forward=True
    )
    compiled = engine._parts.runner._path._compiled
    assert compiled is not None
    run_compiled = Mock(side_effect=compiled._run)
    monkeypatch.setattr(compiled, "_run", run_compiled)

    assert answer_mixed(engine) == expected
    assert run_compiled.call_count >= MAX_TOKENS
    engine.close()


def test_a_library_serves_only_checkpoints_with_equal_short_vectors(checkpoint):
    # torch's compiler writes short vectors into the code, such as the sinks of four attention
    # heads.
    model = AutoModelForCausalLM.from_pretrained(checkpoint("gpt_oss"))
    layer = model.model.layers[0]
    name = library_files._hash_of_library(model, {})
    torch.nn.init.normal_(layer.self_attn.q_proj.weight)
    assert library_files._hash_of_library(model, {}) == name
    torch.nn.init.normal_(layer.self_attn.sinks)
    assert library_files._hash_of_library(model, {}) != name


@pytest.mark.usefixtures("folder")
def test_a_model_that_cannot_be_traced_runs_as_it_is_and_says_why(checkpoint, monkeypatch):
    path = checkpoint("llama")
    forward = LlamaMLP.forward

    def forward_that_reads_numbers(self, hidden):
        return forward(self, hidden if hidden.abs().sum().item() >= 0 else -hidden)

    monkeypatch.setattr(LlamaMLP, "forward", forward_that_reads_numbers)
    expected, _ = answers(path)
    tokens, progress = answers(path, compile_forward=True)
    assert "the forward pass is not compiled: " in progress
    assert tokens == expected


def test_a_library_that_computes_something_else_is_not_used(checkpoint, monkeypatch):
    path = checkpoint("llama")
    expected, _ = answers(path)

    def zero_logits(*inputs):
        logits_index = inputs[2]
        return torch.zeros(len(logits_index), VOCAB_SIZE)

    wrong_library = load_library.CompiledForward(zero_logits)
    monkeypatch.setattr(accelerate_path, "compile_forward", lambda *_, **__: wrong_library)
    tokens, progress = answers(path, compile_forward=True)
    assert "the forward pass is not compiled: its logits differ from" in progress
    assert tokens == expected


def test_a_model_on_another_path_says_that_it_is_not_compiled(tmp_path):
    bloom = Family("bloom", "bloom", {"n_layer": 2, "n_head": 4})
    tokens, progress = answers(bloom.save(tmp_path / "bloom"), compile_forward=True)
    expected = (
        'supports only the forward path "packed", but this model uses the forward path "padded"'
    )
    assert expected in progress
    assert all(len(answer) == 12 for answer in tokens)


def test_a_library_that_another_engine_has_stored_meanwhile_stays(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    library_file = folder / library_files.LIBRARY_FILE

    def compile_while_another_engine_stores_its_library(program, package_path, inductor_configs):
        folder.mkdir()
        with zipfile.ZipFile(library_file, "w") as archive:
            archive.writestr("engine", "other")
        Path(package_path).write_text("of this engine")

    program = SimpleNamespace(constants={})
    monkeypatch.setattr(build_library, "_trace", lambda *_: program)
    monkeypatch.setattr(
        torch._inductor,
        "aoti_compile_and_package",
        compile_while_another_engine_stores_its_library,
    )
    monkeypatch.setattr(build_library, "TracedModel", lambda model: model)
    model = torch.nn.Linear(2, 2)
    model.device = torch.device("meta")

    build_library.build_library(model, None, folder, is_native=False)

    assert zipfile.ZipFile(library_file).read("engine") == b"other"
    assert list(tmp_path.iterdir()) == [folder]


def test_literals_are_loaded_to_the_models_device_except_literals_of_the_cpu(tmp_path):
    class GpuTensor(torch.Tensor):
        """A tensor on the CPU that reports that it is on a GPU."""

        device = torch.device("cuda")

    literals = {"on_cpu": torch.ones(2), "on_gpu": torch.ones(2).as_subclass(GpuTensor)}
    library_files.save_literals(literals, tmp_path / "literals")
    loaded = library_files.load_literals(tmp_path / "literals", torch.device("meta"))
    assert loaded["on_cpu"].device.type == "cpu"
    assert loaded["on_gpu"].device.type == "meta"
    assert loaded["on_cpu"].tolist() == [1.0, 1.0]


def test_a_library_without_literals_can_be_stored(tmp_path):
    library_files.save_literals({}, tmp_path / "none")
    assert library_files.load_literals(tmp_path / "none", torch.device("meta")) == {}
