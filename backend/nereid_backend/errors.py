# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as one tree.

NereidError
├── RequestError          the caller's fault: a bad parameter, a prompt that is too long
├── CapacityError         try again later: the queue is full
├── DeadlineError         the request's time is over
├── ConfigError           the operator's fault: a setting that is unknown, wrong or impossible here
├── ModelError            the checkpoint: missing, broken, or nothing this engine can run
│   └── UnsupportedModelError   the architecture is refused by name, with the reason
└── EngineError           ours: a step of the engine failed

Messages give the value, the limit and the remedy. One that blames a field starts with its name
and a colon: ``temperature: must be at least 0, got nan``.
"""


class NereidError(Exception):
    """Anything that this package raises on purpose."""


class RequestError(NereidError):
    """One request is wrong; others are not affected."""


class CapacityError(NereidError):
    """There is no room now; the same request may succeed later."""


class DeadlineError(NereidError):
    """A request took longer than it was allowed to; what it has generated is lost."""


class ConfigError(NereidError):
    """A setting is unknown, has a wrong value, or does not fit this machine or model."""


class ModelError(NereidError):
    """A checkpoint cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The checkpoint is sound, but its architecture does not run exactly on this engine."""


class EngineError(NereidError):
    """A step failed inside the engine."""


# What errors say after which a process cannot use its GPU any more.
_LOST_DEVICE = ("CUDA error", "CUDNN_STATUS_EXECUTION_FAILED", "AcceleratorError")


def is_lost_device(message: str) -> bool:
    """Whether an error's text says that the driver's context is broken: later calls fail, too."""
    return any(sign in message for sign in _LOST_DEVICE)
