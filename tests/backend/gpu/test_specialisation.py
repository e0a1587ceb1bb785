"""Tests that Triton compiles no kernel again for numbers that change from step to step."""

import json
import os
import subprocess
import sys

import pytest

# The numeric arguments that Triton specialises: Triton compiles a kernel separately for the value
# 1, for multiples of 16 and for other values. Only arguments that the model and its KV cache
# determine may be specialised. They never change while a server runs. For other arguments, a new
# value could compile the kernel again and stop the server for seconds.
FIXED = {
    "decode_kernel": {"query_head_stride", "query_token_stride", "scale", "cap"},
    "reduce_kernel": set(),
    "prefill_kernel": {"query_head_stride", "query_token_stride", "scale", "cap"},
    "store_kernel": {
        *("key_head_stride", "key_token_stride", "value_head_stride", "value_token_stride"),
    },
    "sample_kernel": {"logits_stride", "raw_stride", "vocab_size"},
}

PROGRAM = """
import json
from nereid_backend.attention.gpu.triton_decode import decode_kernel, reduce_kernel
from nereid_backend.attention.gpu.triton_prefill import prefill_kernel
from nereid_backend.attention.gpu.triton_store import store_kernel
from nereid_backend.sampling.triton_sampling import sample_kernel

kernels = (decode_kernel, reduce_kernel, prefill_kernel, store_kernel, sample_kernel)
print(json.dumps({
    kernel.__name__: [
        p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)
    ]
    for kernel in kernels
}))
"""
# The arguments that are tensors. Their addresses are always multiples of 16 bytes, so Triton
# compiles no further variants.
TENSORS = {
    *("query", "keys", "values", "key_scales", "value_scales", "out", "parts", "weights_log"),
    *(
        "sinks",
        "table",
        "table_starts",
        "tokens",
        "lens",
        "longest",
        "sequences",
        "tiles",
        *("new_keys", "new_values", "cached_keys", "cached_values"),
    ),
    *("slots", "logits", "raw", "settings", "token_ids", "logprobs", "has_allowed"),
}


def test_no_kernel_is_compiled_for_numbers_that_change_from_step_to_step():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    arguments_of_kernels = json.loads(result.stdout)
    numbers_of_kernels = {
        kernel: set(arguments) - TENSORS for kernel, arguments in arguments_of_kernels.items()
    }
    assert numbers_of_kernels == FIXED
