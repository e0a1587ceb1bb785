"""Compile the Triton kernels for GPUs on a machine without a GPU, and print their resources.

    python -m loadtest.gpu.compile_kernels --capabilities 80 90 --specs 128

The program prints one JSON object for each kernel: its shared memory, its registers, the bytes of
spilled registers (stack_bytes), its matrix instructions, and its number of asynchronous copies. The
launches are those of GPU attention and of the GPU sampler. They are recorded instead of run.
"""

import json
import re
import subprocess
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
from nereid_backend.attention.attention_batch import Prefill
from nereid_backend.attention.gpu import gpu_attention, triton_decode, triton_prefill, triton_store
from nereid_backend.attention.gpu.gpu_batch import DecodeRows, PrefillRows
from nereid_backend.attention.gpu.gpu_call import AttentionCall, Float8
from nereid_backend.attention.gpu.tuning import KERNELS, Device, Entry, Tuning
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.sampling import gpu_sampling, triton_sampling
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loadtest import command_line

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
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float64: "*fp64",
}
_MODULES = (triton_store, triton_decode, triton_prefill, triton_sampling)
# The name of an additional case that is not in SPECS: the kernels of the sampler.
_SAMPLING = "sampling"
_VOCAB_SIZE = 151_936


class Recorder:
    """Replaces a kernel, and records the arguments of its launches instead of running it."""

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 - triton is untyped
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:  # noqa: ANN401 - as above
        def launch(*args: object, **named: object) -> None:
            self.launches.append((args, named))

        return launch


def record(
    case: str, dtype: torch.dtype, capability: int, tuning: Tuning | None = None
) -> list[Recorder]:
    """Record the kernel launches of one attention layer, or of sampling.

    The step of the attention layer contains decodes and a prefill.

    Args:
        case: the name of the layer in SPECS, or "sampling".
        dtype: the dtype of the KV cache, or of the logits.
        capability: the compute capability of the GPU, such as 90.
        tuning: tile sizes for all kernels, instead of the defaults of the GPU.

    Returns:
        One recorder for each kernel that was launched.
    """
    recorders = {
        (module, name): Recorder(getattr(module, name))
        for module in _MODULES
        for name in kernel_names(module)
    }
    try:
        for (module, name), recorder in recorders.items():
            setattr(module, name, recorder)
        device = Device({}, (capability // 10, capability % 10))
        if tuning is not None:
            device = fixed(tuning)
        if case == _SAMPLING:
            run_sampling(dtype)
        else:
            float8 = Float8.DEVICE if capability >= 90 else Float8.BITS
            run_layer(SPECS[case], dtype, device, float8)
    finally:
        for (module, name), recorder in recorders.items():
            setattr(module, name, recorder.kernel)
    return [recorder for recorder in recorders.values() if recorder.launches]


def kernel_names(module: ModuleType) -> list[str]:
    """Return the names of the kernels in a module. Its other functions are called by kernels."""
    return [name for name in vars(module) if name.endswith("_kernel")]


def fixed(tuning: Tuning) -> Device:
    """Return a device whose kernels all have the same tuning."""
    sizes = {dtype.itemsize for dtype in DTYPES.values()}
    return Device({name: [Entry(2**16, s, tuning) for s in sizes] for name in KERNELS})


def run_layer(spec: LayerSpec, dtype: torch.dtype, device: Device, float8: Float8) -> None:
    """Call the kernels of one attention layer on tensors without memory."""
    num_tokens, block_size = 80, 16
    is_scaled = dtype.itemsize == 1
    model_dtype = torch.bfloat16 if is_scaled else dtype

    def empty(*shape: int, of: torch.dtype = model_dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    def packed(heads: int, dim: int) -> Tensor:
        return empty(num_tokens, heads, dim).transpose(0, 1)

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    scales = empty(65, spec.num_kv_heads, block_size, of=torch.float32)
    call = AttentionCall(
        spec,
        empty(65, spec.num_kv_heads, block_size, spec.key_dim, of=dtype),
        empty(65, spec.num_kv_heads, block_size, spec.value_dim, of=dtype),
        spec.key_dim**-0.5,
        empty(spec.num_heads) if spec.has_sinks else None,
        (scales, scales) if is_scaled else None,
        float8 if dtype == torch.uint8 else Float8.NONE,
    )
    query = packed(spec.num_heads, spec.key_dim)
    out = empty(num_tokens, spec.num_heads, spec.value_dim)
    new = packed(spec.num_kv_heads, spec.key_dim), packed(spec.num_kv_heads, spec.value_dim)
    dim, itemsize = max(spec.key_dim, spec.value_dim), dtype.itemsize
    gpu_attention.store(*new, call, numbers(num_tokens))
    # The sequence is so long that the decode kernel splits it into parts. The second launch is the
    # one that CUDA graphs capture: it reads the length of the longest sequence from memory.
    for longest in (None, numbers(1)):
        rows = DecodeRows(
            1, [(1, 2**20)], numbers(2**16), numbers(1), numbers(1), numbers(1), longest
        )
        gpu_attention.decode(query, call, rows, out, device.tuning("decode", dim, itemsize))
    prefills = PrefillRows([Prefill(16, 80, 1024, numbers(1, 68))], numbers(68), numbers(1, 4))
    gpu_attention.prefill(query, call, prefills, out, device.tuning("prefill", dim, itemsize))


def run_sampling(dtype: torch.dtype) -> None:
    """Call the kernels of the sampler on logits without memory."""
    logits = torch.empty(64, _VOCAB_SIZE, dtype=dtype, device="meta")
    gpu_sampling.sample(logits, logits, np.zeros((5, 64)))


def compile_launch(
    kernel: Any,  # noqa: ANN401 - triton is untyped
    args: tuple[Any, ...],
    named: dict[str, Any],
    capability: int,
) -> dict[str, Any]:
    """Compile the kernel of a launch, and return its resources."""
    options = {
        name: named[name]
        for name in ("num_warps", "num_stages", "enable_fp_fusion")
        if name in named
    }
    constants = {name: value for name, value in named.items() if name not in options}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(arg, float):
            signature[name] = "fp32"
        elif kernel.params[index].do_not_specialize:
            signature[name] = "i32"
        elif isinstance(arg, int) and arg == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = _POINTERS[arg.dtype] if isinstance(arg, Tensor) else "i32"
            if isinstance(arg, Tensor) or arg % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(named.keys() - options.keys(), "constexpr")
    source = ASTSource(kernel, signature, constants, attributes)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = done.asm["ptx"]
    waits = re.findall(r"ttg\.async_wait\b[^\n]*\bnum = (\d+)", done.asm["ttgir"])
    return {
        "shared_bytes": done.metadata.shared,
        **resources(done.asm["cubin"]),
        "products": sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", code))),
        "num_async_copies": len(re.findall(r"cp\.async\.c[ag]", code)),
        "copies_in_flight": max(map(int, waits), default=0),
    }


def resources(binary: bytes) -> dict[str, int]:
    """Return the number of registers of each thread, and the bytes of spilled registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": found["REG"], "stack_bytes": found["STACK"]}


def main() -> None:
    """Compile the selected kernels, and print one line for each."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    specs, dtypes = [*SPECS, _SAMPLING], list(DTYPES)
    add("--capabilities", type=int, nargs="+", default=[80, 90], help="compute capabilities")
    add("--specs", nargs="+", choices=specs, default=specs, help="layers, or the sampler")
    add("--dtypes", nargs="+", choices=dtypes, default=["bfloat16"], help="dtypes of the cache")
    add("--kernels", nargs="+", help="names of kernels (default: all)")
    add(
        "--tuning",
        type=int,
        nargs=4,
        metavar=("ROWS", "TILE", "WARPS", "STAGES"),
        help="tile sizes for all kernels (default: the defaults of each GPU)",
    )
    args = parser.parse_args()
    tuning = Tuning(*args.tuning) if args.tuning else None
    warnings.simplefilter("ignore")
    for name in args.specs:
        for dtype in args.dtypes:
            if name == _SAMPLING and DTYPES[dtype].itemsize == 1:
                continue
            for capability in args.capabilities:
                for recorder in record(name, DTYPES[dtype], capability, tuning):
                    if args.kernels and recorder.kernel.__name__ not in args.kernels:
                        continue
                    line = {"kernel": recorder.kernel.__name__, "spec": name, "dtype": dtype}
                    line["capability"] = capability
                    for args_of_launch, named in recorder.launches:
                        line["captured"] = bool(named.get("READS_LONGEST"))
                        facts = compile_launch(recorder.kernel, args_of_launch, named, capability)
                        print(json.dumps({**line, **facts}), flush=True)


if __name__ == "__main__":
    main()
