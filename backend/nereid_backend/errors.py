# SPDX-License-Identifier: Apache-2.0
"""The exceptions that this package raises, all derived from one base class.

NereidError
├── RequestError          the request is wrong: a bad field, a prompt that is too long
├── CapacityError         the server is busy: the queue is full, and a later try may succeed
├── DeadlineError         the request has exceeded its time limit
├── ConfigError           a setting is unknown, wrong or does not fit this machine
├── ModelError            the checkpoint is missing or broken, or this engine cannot run it
│   └── UnsupportedModelError   the engine does not support the checkpoint's architecture
└── EngineError           the engine failed because of a bug or a broken device
    └── LostRankError     a process of tensor parallelism ended, so no step can be computed

A message names the value, the limit and the remedy. If one field or setting is wrong, the message
begins with the name of the field or setting and a colon. Example: `temperature: the value must be
at least 0, but it is -1.` The HTTP frontend reads the name from the message.
"""


class NereidError(Exception):
    """The base class of the exceptions that this package raises on purpose."""


class RequestError(NereidError):
    """A request is invalid or not allowed. Other requests are not affected."""


class CapacityError(NereidError):
    """The server is too busy for the request. The same request may succeed later."""


class DeadlineError(NereidError):
    """A request has exceeded its time limit, so its generated text is discarded."""


class ConfigError(NereidError):
    """A setting is unknown, has a wrong value, or does not fit this machine or model."""


class ModelError(NereidError):
    """A checkpoint cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The checkpoint is intact, but the engine cannot run its architecture correctly."""


class EngineError(NereidError):
    """A step of the engine failed."""


class LostRankError(EngineError):
    """One of the processes that compute the model has ended. The engine cannot continue."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the class name if the message is empty.

    A first line that ends with a colon has no meaning without the second line, so the result then
    contains both lines. Example: "Validation error for field 'head_dim': TypeError: ...".
    """
    message = str(error).strip() or type(error).__name__
    first, *others = message.splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def one_line(error: BaseException) -> str:
    """Return an error's message as one line, or the class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


# If an error message contains one of these texts, the process can no longer use the GPU.
_LOST_DEVICE_TEXTS = ("CUDA error", "CUDNN_STATUS_EXECUTION_FAILED", "AcceleratorError")


def is_lost_device(message: str) -> bool:
    """Return whether an error message shows that this process can no longer use the GPU.

    After such an error, every later GPU call of the process fails, too.
    """
    return any(text in message for text in _LOST_DEVICE_TEXTS)
