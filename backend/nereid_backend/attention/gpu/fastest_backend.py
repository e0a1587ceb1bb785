# SPDX-License-Identifier: Apache-2.0
"""Measures attention libraries when a model is loaded, and chooses the fastest library.

A library replaces the project's kernels in a `Situation` only under two conditions. The results of
the library must equal the results of the reference, and the library must be faster than the kernels
on a step of typical size.
"""

import logging
import statistics
from collections.abc import Callable, Sequence

import torch

from nereid_backend.attention.gpu import gpu_check
from nereid_backend.attention.gpu.backends.attention_backend import (
    AttentionBackend,
    ChosenBackends,
    Situation,
)
from nereid_backend.attention.gpu.backends.cudnn_sdpa import CudnnSdpa
from nereid_backend.attention.gpu.backends.flashinfer_prefill import FlashInferPrefill
from nereid_backend.attention.gpu.backends.torch_varlen import TorchVarlen
from nereid_backend.attention.gpu.gpu_check import Trial, TrialLayer, TrialStep
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.errors import first_line

logger = logging.getLogger(__name__)

# The type of a function that measures another function `work`. The measuring function calls `work`,
# and returns the time that the call takes on the device, in milliseconds.
Timer = Callable[[Callable[[], object]], float]

# A library is used only if it takes at most `_MAX_SHARE` times as long as the project's kernels. A
# smaller advantage could be a measurement error.
_MAX_SHARE = 0.95
_NUM_WARM_UPS = 3
_NUM_RUNS = 7


# The test inputs for each situation: decodes, whole prompts, or later parts of prompts. With the
# `_CHECKED` inputs, the results of a library are compared with the results of the reference
# implementation. With the `_MEASURED` inputs, the time of a library is measured.
_CHECKED = {
    Situation.DECODE: TrialStep(decodes=(400, 1, 17)),
    Situation.PROMPT: TrialStep(prefills=((0, 40), (0, 7))),
    Situation.CHUNK: TrialStep(prefills=((0, 40), (140, 20))),
}
_MEASURED = {
    Situation.DECODE: TrialStep(decodes=(1024,) * 32),
    Situation.PROMPT: TrialStep(prefills=((0, 2048),)),
    Situation.CHUNK: TrialStep(prefills=((2048, 512),)),
}


def milliseconds(work: Callable[[], object]) -> float:
    """Call `work` several times, and return its median time on the current GPU in milliseconds."""
    for _ in range(_NUM_WARM_UPS):
        work()  # The first calls are slower, for example because they compile kernels.
    times: list[float] = []
    for _ in range(_NUM_RUNS):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()  # waits until the GPU has finished the work
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def supported_backends() -> list[AttentionBackend]:
    """Return a new object for each attention library that this package supports."""
    return [CudnnSdpa(), TorchVarlen(), FlashInferPrefill()]


@torch.inference_mode()
def fastest_backends(
    layers: Sequence[TrialLayer],
    backends: Sequence[AttentionBackend],
    timer: Timer = milliseconds,
) -> ChosenBackends:
    """Measure attention libraries. Return the libraries that are faster than the project's kernels.

    The libraries are compared with the project's own kernels for each layer in each `Situation`:
    DECODE (sequences with one new token), PROMPT (prefills without cached tokens) or CHUNK
    (prefills, some of which have cached tokens). The result maps a pair (the properties of a layer,
    a situation) to the fastest library. If the kernels are the fastest, the result does not contain
    the pair. If a library cannot be used for a pair, log a warning with the reason.

    Args:
        layers: one attention layer of each kind in the model. Their cache must not store 8-bit
            numbers, which the libraries cannot read.
        backends: the libraries to measure.
        timer: the function that measures a call.
    """
    chosen: dict[tuple[LayerSpec, Situation], AttentionBackend] = {}
    for layer in layers:
        for situation in Situation:
            usable = [backend for backend in backends if _is_usable(backend, situation, layer)]
            fastest = _fastest(usable, situation, layer, timer)
            if fastest is not None:
                chosen[layer.spec, situation] = fastest
    return chosen


def _is_usable(backend: AttentionBackend, situation: Situation, layer: TrialLayer) -> bool:
    """Return whether a library computes a layer correctly. If it does not, log the reason."""
    if situation not in backend.situations:
        return False
    reason = backend.refusal(layer.spec, layer.block_size, layer.dtype)
    if reason is None:
        reason = _why_wrong(backend, situation, layer)
    if reason is not None:
        logger.warning("%s does not compute %s, because %s.", backend.name, situation.value, reason)
    return reason is None


def _why_wrong(backend: AttentionBackend, situation: Situation, layer: TrialLayer) -> str | None:
    """Test a library. Return an error message, or None if the results of the library are correct.

    If the library raises an exception, the error message is the message of the exception.
    """
    trial = layer.make_trial(_CHECKED[situation])
    try:
        gpu_check.check_trial(trial, trial.attend({(layer.spec, situation): backend}))
    except Exception as error:  # noqa: BLE001
        # A library may raise any exception. After an exception, the library is not used.
        return first_line(error)
    return None


def _fastest(
    backends: Sequence[AttentionBackend], situation: Situation, layer: TrialLayer, timer: Timer
) -> AttentionBackend | None:
    """Return the fastest library; None if the project's kernels are faster.

    The libraries and the kernels compute a typical step of the situation. A library is returned
    only if it needs at most 95 % of the kernels' time (`_MAX_SHARE`), because a smaller advantage
    could be a measurement error.

    Args:
        backends: the libraries. If there is none, the result is None.
        situation: the situation.
        layer: the layer that is computed.
        timer: the function that measures a call.
    """
    if not backends:
        return None
    trial = layer.make_trial(_MEASURED[situation])
    kernels_ms = timer(trial.attend)
    library_ms = [_library_ms(backend, situation, trial, timer) for backend in backends]
    fastest_ms = min(library_ms)
    fastest = backends[library_ms.index(fastest_ms)]
    is_worthwhile = fastest_ms <= _MAX_SHARE * kernels_ms
    logger.info(
        "%s computes %s in %.3f ms, and the project's kernels need %.3f ms, so %s.",
        fastest.name,
        situation.value,
        fastest_ms,
        kernels_ms,
        "the library is used" if is_worthwhile else "the kernels are used",
    )
    return fastest if is_worthwhile else None


def _library_ms(
    backend: AttentionBackend, situation: Situation, trial: Trial, timer: Timer
) -> float:
    """Return how many milliseconds a library needs for the attention of the test step `trial`."""
    backends: ChosenBackends = {(trial.spec, situation): backend}
    return timer(lambda: trial.attend(backends))
