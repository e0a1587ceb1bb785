"""Compile the Triton kernels for GPUs on a machine without a GPU, and print their resources.

    python -m loadtest.gpu.compile_kernels --capabilities 80 90 --specs 128

The program prints one JSON object for each kernel: its shared memory, its registers, the bytes of
spilled registers (stack_bytes), its matrix instructions, and its number of copies in flight. The
launches are those of GPU attention and of the GPU sampler. They are recorded instead of run.
"""

import contextlib
import itertools
import json
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from nereid_backend.attention.attention_batch import Prefill
from nereid_backend.attention.gpu import gpu_attention, triton_decode, triton_prefill, triton_store
from nereid_backend.attention.gpu.gpu_batch import DecodeRows, PrefillRows
from nereid_backend.attention.gpu.gpu_call import AttentionCall, Float8
from nereid_backend.attention.gpu.tuning import Device
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.sampling import gpu_sampling, triton_sampling
from torch import Tensor
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loadtest.command_line import Option, parse_command_line

SPECS = {
    "128": LayerSpec(32, 8, 128, 128),
    "64-window-sinks": LayerSpec(64, 8, 64, 64, LayerWindow(size=128), None, True),
    "80": LayerSpec(16, 16, 80, 80),
    "96": LayerSpec(32, 32, 96, 96),
    "256-softcap-window": LayerSpec(16, 8, 256, 256, LayerWindow(size=4096), 50.0),
    "192-128": LayerSpec(16, 16, 192, 128),
    "128-chunk": LayerSpec(40, 8, 128, 128, LayerWindow(chunk=8192)),
    "512": LayerSpec(8, 2, 512, 512),
}
# With an 8-bit dtype, the model uses bfloat16, and its KV cache stores int8 or float8 numbers (as
# bytes).
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.uint8,
}
# Arguments of a launch that are options of the compiler.
_COMPILER_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
_MODULES = (triton_store, triton_decode, triton_prefill, triton_sampling)
# The name of an additional case that is not in SPECS: the kernels of the sampler.
_SAMPLING = "sampling"
_SAMPLED_ROWS, _VOCAB_SIZE = 64, 151_936
_BLOCK_SIZE, _NUM_BLOCKS = 16, 64
# The new tokens of a step: some decodes, and one prompt whose first tokens are cached.
_NUM_DECODES, _NUM_PROMPT_TOKENS, _NUM_CACHED = 16, 64, 1024
# The decode kernel splits a sequence of this length into parts.
_LONG_SEQUENCE = 2**20
_WARP_SIZE = 32
OPTIONS = {
    "--capabilities": Option([80, 90], "compute capabilities of the GPUs"),
    "--specs": Option([*SPECS, _SAMPLING], "layers, or the sampler", [*SPECS, _SAMPLING]),
    "--dtypes": Option(["bfloat16"], "dtypes of the cache or of the logits", list(DTYPES)),
}


class Launch(NamedTuple):
    """The arguments of one launch of a kernel."""

    kernel: Any
    args: tuple[Any, ...]
    named: dict[str, Any]


class Recorder:
    """Replaces a kernel, and records the arguments of its launches instead of running it."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:  # noqa: ANN401 - no types
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that records one launch. The size of the grid has no effect."""

        def launch(*args: object, **named: object) -> None:
            self._launches.append(Launch(self._kernel, args, named))

        return launch


def record(case: str, dtype: torch.dtype, capability: int) -> list[Launch]:
    """Return the kernel launches of one attention layer, or of sampling.

    The step of the attention layer contains decodes and a prefill.

    Args:
        case: the name of the layer in SPECS, or "sampling".
        dtype: the dtype of the KV cache, or of the logits.
        capability: the compute capability of the GPU, such as 90.
    """
    launches: list[Launch] = []
    with contextlib.ExitStack() as patches:
        for module in _MODULES:
            for name in kernel_names(module):
                recorder = Recorder(getattr(module, name), launches)
                patches.enter_context(mock.patch.object(module, name, recorder))
        if case == _SAMPLING:
            run_sampling(dtype)
        else:
            float8 = Float8.DEVICE if capability >= 90 else Float8.BITS
            run_layer(SPECS[case], dtype, Device({}, divmod(capability, 10)), float8)
    return launches


def kernel_names(module: ModuleType) -> list[str]:
    """Return the names of the kernels in a module. Its other functions are called by kernels."""
    return [name for name in vars(module) if name.endswith("_kernel")]


def run_layer(spec: LayerSpec, dtype: torch.dtype, device: Device, float8: Float8) -> None:
    """Call the kernels of one attention layer on tensors without memory."""
    num_tokens = _NUM_DECODES + _NUM_PROMPT_TOKENS
    model_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    call = _attention_call(spec, dtype, model_dtype, float8)

    def packed(num_heads: int, dim: int) -> Tensor:
        return _empty(num_tokens, num_heads, dim, dtype=model_dtype).transpose(0, 1)

    query = packed(spec.num_heads, spec.key_dim)
    key = packed(spec.num_kv_heads, spec.key_dim)
    value = packed(spec.num_kv_heads, spec.value_dim)
    out = _empty(num_tokens, spec.num_heads, spec.value_dim, dtype=model_dtype)
    dim = max(spec.key_dim, spec.value_dim)
    gpu_attention.store(key, value, call, _integers(num_tokens))
    # The second launch is the one that CUDA graphs capture. It reads the length of the longest
    # sequence from memory.
    for longest in (None, _integers(1)):
        decodes = DecodeRows(
            count=1,
            bounds=[(1, _LONG_SEQUENCE)],
            table=_integers(_LONG_SEQUENCE // _BLOCK_SIZE),
            table_starts=_integers(1),
            tokens=_integers(1),
            lens=_integers(1),
            longest=longest,
        )
        tuning = device.tuning("decode", dim, dtype.itemsize)
        gpu_attention.decode(query, call, decodes, out, tuning)
    num_blocks = (_NUM_CACHED + _NUM_PROMPT_TOKENS) // _BLOCK_SIZE
    prompt = Prefill(_NUM_DECODES, num_tokens, _NUM_CACHED, blocks=_integers(1, num_blocks))
    prefills = PrefillRows([prompt], _integers(num_blocks), _integers(1, 4))
    tuning = device.tuning("prefill", dim, dtype.itemsize)
    gpu_attention.prefill(query, call, prefills, out, tuning)


def _attention_call(
    spec: LayerSpec, dtype: torch.dtype, model_dtype: torch.dtype, float8: Float8
) -> AttentionCall:
    """Return the arguments of an attention call on a KV cache of `dtype` without memory."""
    places = (_NUM_BLOCKS + 1, spec.num_kv_heads, _BLOCK_SIZE)
    scales = _empty(*places, dtype=torch.float32)
    return AttentionCall(
        spec,
        keys=_empty(*places, spec.key_dim, dtype=dtype),
        values=_empty(*places, spec.value_dim, dtype=dtype),
        scale=spec.key_dim**-0.5,
        sinks=_empty(spec.num_heads, dtype=model_dtype) if spec.has_sinks else None,
        scales=(scales, scales) if dtype.itemsize == 1 else None,
        float8=float8 if dtype == torch.uint8 else Float8.NONE,
    )


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def run_sampling(dtype: torch.dtype) -> None:
    """Call the kernels of the sampler on logits without memory."""
    logits = _empty(_SAMPLED_ROWS, _VOCAB_SIZE, dtype=dtype)
    parameters = np.zeros((5, _SAMPLED_ROWS))
    gpu_sampling.sample(logits, logits, parameters)


def compile_launch(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile the kernel of a launch, and return its resources."""
    options = {name: launch.named[name] for name in _COMPILER_OPTIONS & launch.named.keys()}
    source = _source(launch)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, _WARP_SIZE), options=options
    )
    waits = re.findall(r"ttg\.async_wait\b[^\n]*\bnum = (\d+)", compiled.asm["ttgir"])
    products = re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", compiled.asm["ptx"])
    return {
        "shared_bytes": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
        "products": sorted(set(products)),
        "copies_in_flight": max(map(int, waits), default=0),
    }


def _source(launch: Launch) -> ASTSource:
    """Return a kernel with the types of its arguments, as Triton derives them from a launch.

    Named arguments are constants of the kernel, except those that are options of the compiler.
    """
    constants = {
        name: value for name, value in launch.named.items() if name not in _COMPILER_OPTIONS
    }
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    names = launch.kernel.arg_names
    for index, (name, arg) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(arg, float):
            signature[name] = "fp32"
        elif launch.kernel.params[index].do_not_specialize:
            signature[name] = "i32"
        elif isinstance(arg, int) and arg == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            is_tensor = isinstance(arg, Tensor)
            signature[name] = f"*{canonicalize_dtype(arg.dtype)}" if is_tensor else "i32"
            if is_tensor or arg % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.named.keys() - _COMPILER_OPTIONS, "constexpr")
    return ASTSource(launch.kernel, signature, constants, attributes)


def resources(binary: bytes) -> dict[str, int]:
    """Return the number of registers of each thread, and the bytes of spilled registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": usage["REG"], "stack_bytes": usage["STACK"]}


def main() -> None:
    """Compile the selected kernels, and print one line for each."""
    args = parse_command_line(__doc__, OPTIONS)
    warnings.simplefilter("ignore")
    for case, dtype, capability in itertools.product(args.specs, args.dtypes, args.capabilities):
        if case == _SAMPLING and DTYPES[dtype].itemsize == 1:
            continue  # logits do not have 8 bits
        for launch in record(case, DTYPES[dtype], capability):
            facts = {
                "kernel": launch.kernel.__name__,
                "spec": case,
                "dtype": dtype,
                "capability": capability,
                "captured": bool(launch.named.get("READS_LONGEST")),
            }
            print(json.dumps(facts | compile_launch(launch, capability)), flush=True)


if __name__ == "__main__":
    main()
