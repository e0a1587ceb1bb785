# SPDX-License-Identifier: Apache-2.0
"""A model's forward pass as one compiled function.

torch.export traces transformers' model code once, for any number of tokens, with attention and
linear layers as operators of ours; AOTInductor fuses what is between them and compiles it into a
library that runs without Python. The library is kept on disk under a name that says what it was
made from. Weights are not in it: it reads those of the loaded model where they are.

Made and tested on CPUs. For a GPU the same is done with the model's tensors there, and has never
run on one.
"""

import hashlib
import inspect
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from nereid_backend.attention.cpu.cpu_build import cache_folder, processor
from nereid_backend.attention.interface import AttentionHook, PagedForward
from nereid_backend.attention.torch_operator import TracedForward, serving
from nereid_backend.linear import native_linear
from nereid_backend.paths.model_call import ModelCall, UnfitError
from nereid_backend.paths.step_batch import StepBatch

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
Shims = dict[torch._ops.OpOverload, list[str]]

# torch.export takes a size of one for a constant, so that every other size would need a second
# trace; and it takes sizes that are equal in its example for the same size.
_LEAST_ROWS = 2
_EXAMPLE_TOKENS, _EXAMPLE_LOGITS = 7, 3
# Literals in a model's code are small; what is larger depends on the checkpoint, one must assume.
_LARGEST_LITERAL = 65536
_LIBRARY, _LITERALS = "model.pt2", "literals.safetensors"
# Whose text a library depends on, besides the model's own.
_SOURCES = (
    "paths/compiled_forward.py",
    "linear/native_linear.py",
    "attention/torch_operator.py",
    "attention/cpu/cpu_shim.cpp",
)


class CompiledForward:
    """Runs steps of one model. Made by `compile_forward`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self._run = run

    def __call__(self, batch: StepBatch, attention: PagedForward) -> Tensor:
        """Logits of a step, [num_logits, vocab_size].

        Mutates: the KV cache behind ``attention``.
        """
        rows = (batch.input_ids, batch.position_ids, batch.logits_index)
        with serving(attention):
            logits = self._run(*(_at_least(tensor, _LEAST_ROWS) for tensor in rows))
        return logits[: batch.num_logits]


def compile_forward(
    model: PreTrainedModel, hook: AttentionHook, progress: Progress, *, is_native: bool = False
) -> CompiledForward:
    """Compile a model for the device that it is on, or take what was compiled before.

    Args:
        model: with ``hook`` as its attention, on a CPU its linear layers packed
            (`prepack_linears`).
        hook: the engine's entry in transformers' attention interface.
        progress: gets a line when it takes long.
        is_native: whether attention will be over a native cache, so that its kernels can be called
            without Python.

    Raises:
        Exception: of any kind, where torch cannot trace or compile the model's code.
    """
    whole, device = _Whole(model), model.device
    shims = _shims(is_native) if device.type == "cpu" else {}
    folder = cache_folder() / "compiled" / _fingerprint(model, shims)
    if not (folder / _LIBRARY).is_file():
        progress(
            f"compiling the forward pass of {type(model).__name__}: half a minute and more, once "
            f"for this machine and shape; kept in {folder}"
        )
        _build(whole, hook, folder, shims)
    # An engine has one thread, and the library's own care for several cannot be captured.
    run = torch._inductor.aoti_load_package(
        str(folder / _LIBRARY),
        run_single_threaded=True,
        device_index=-1 if device.index is None else device.index,
    )
    known = _load_literals(folder / _LITERALS, device) | _tensors(whole)
    names = run.get_constant_fqns()
    if unknown := [name for name in names if name not in known]:
        raise UnfitError(f"its code uses {unknown[0]}, which is neither parameter nor buffer")
    constants = {name: known[name] for name in names}
    run.load_constants(constants, check_full_update=True, user_managed=True)
    return CompiledForward(run)


class _Whole(nn.Module):
    """What is traced: from a packed step's tensors to its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._selects = ModelCall(model).takes("logits_to_keep")

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_index: Tensor) -> Tensor:
        """Shapes as in `StepBatch`; returns [len(logits_index), vocab_size]."""
        selected = {"logits_to_keep": logits_index} if self._selects else {}
        output = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **selected
        )
        logits: Tensor = output.logits[0]
        return logits if self._selects else logits[logits_index]


def _shims(is_native: bool) -> Shims:
    """Operators that compiled code calls as C functions, and their declarations (cpu_shim.cpp)."""
    operators = torch.ops.nereid
    handle = "AtenTensorHandle"
    found: Shims = {}
    if native_linear.is_available():
        found[operators.packed_linear.default] = [
            f"AOTITorchError aoti_torch_cpu_packed_linear({handle} x, {handle} packed, "
            f"{handle}* bias, int64_t out_features, {handle}* out)"
        ]
    if is_native:
        found[operators.paged_attend.default] = [
            f"AOTITorchError aoti_torch_cpu_paged_attend({handle} query, {handle} key, "
            f"{handle} value, {handle}* sinks, int64_t layer, double scale, {handle}* out)"
        ]
    return found


def _build(whole: _Whole, hook: AttentionHook, folder: Path, shims: Shims) -> None:
    num_tokens = torch.export.Dim("num_tokens", min=_LEAST_ROWS)
    num_logits = torch.export.Dim("num_logits", min=_LEAST_ROWS)
    tokens = torch.arange(_EXAMPLE_TOKENS, device=whole.model.device)
    example = (torch.zeros_like(tokens)[None], tokens[None], tokens[:_EXAMPLE_LOGITS].clone())
    with torch.no_grad(), _quiet(), hook.serving(TracedForward()):
        program = torch.export.export(
            whole,
            example,
            dynamic_shapes=({1: num_tokens}, {1: num_tokens}, {0: num_logits}),
            strict=False,
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there: another process may compile the same.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, _quiet():
        made = Path(temporary) / "made"
        made.mkdir()
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(made / _LIBRARY),
            inductor_configs={
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.custom_ops_to_c_shims": shims,
                # Its pool of compiling processes would stay beside the engine.
                "compile_threads": 1,
            },
        )
        _save_literals(_literals(program.constants, _tensors(whole)), made / _LITERALS)
        if folder.is_dir():
            shutil.rmtree(folder)
        made.rename(folder)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    named: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    named.update(module.named_parameters(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named.items()}


def _literals(constants: dict[str, Any], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that the traced code makes out of nothing.

    Raises:
        UnfitError: one is so large that it must come from the checkpoint.
    """
    found = {}
    for name, tensor in constants.items():
        if name in own:
            continue
        if not isinstance(tensor, Tensor) or tensor.numel() > _LARGEST_LITERAL:
            raise UnfitError(f"its code uses {name}, which is neither parameter nor buffer")
        found[name] = tensor.detach().clone().contiguous()
    return found


def _save_literals(literals: dict[str, Tensor], file: Path) -> None:
    # Some code keeps small tensors on the host, wherever the model is.
    kinds = {name: tensor.device.type for name, tensor in literals.items()}
    save_file(literals, file, metadata={"devices": json.dumps(kinds)})


def _load_literals(file: Path, device: torch.device) -> dict[str, Tensor]:
    """What was saved, on the device, but for what was on the host."""
    with safe_open(file, framework="pt") as opened:
        kinds = json.loads(opened.metadata()["devices"])
        return {
            name: opened.get_tensor(name).to("cpu" if kind == "cpu" else device)
            for name, kind in kinds.items()
        }


def _at_least(tensor: Tensor, num_rows: int) -> Tensor:
    """The last dimension made longer by its last number where it is shorter."""
    missing = num_rows - tensor.shape[-1]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], missing)], dim=-1)


def _fingerprint(model: PreTrainedModel, shims: Shims) -> str:
    """Changes with all that a library depends on but the weights' numbers."""
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and "attn_implementation" not in name
    }
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    root = Path(__file__).parents[1]
    parts = [
        *(version(name) for name in ("torch", "transformers")),
        *((root / source).read_text(encoding="utf-8") for source in _SOURCES),
        Path(inspect.getfile(type(model))).read_text(encoding="utf-8"),
        json.dumps(config, sort_keys=True, default=str),
        repr([(name, type(module).__name__) for name, module in model.named_modules()]),
        repr(tensors),
        repr(sorted(map(str, shims.values()))),
        str(torch.get_num_threads()),
        *_machine(model.device),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _machine(device: torch.device) -> list[str]:
    """What compiled code is made for."""
    if device.type != "cuda":
        return [processor()]
    capability = torch.cuda.get_device_capability(device)
    return [
        *(processor(), version("triton"), str(torch.version.cuda)),
        *(torch.cuda.get_device_name(device), str(capability)),
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that torch gives about its own parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
