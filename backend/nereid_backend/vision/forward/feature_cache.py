# SPDX-License-Identifier: Apache-2.0
"""A cache of the features of images, videos and audio.

The features are the output of a model's image encoder or audio encoder.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

_METHODS = ("get_image_features", "get_video_features", "get_audio_features")


class _Key(NamedTuple):
    """The key of cached features: the hash of the images, and the number of the encoder call.

    A model can call its encoders several times for the same images.
    """

    digest: bytes
    call: int


class FeatureCache:
    """Caches the image, video and audio features that a model computes.

    The key of a result consists of the digest of the images and the number of the call.

    Args:
        max_bytes: the largest size of the stored features. If the size is exceeded, the least
            recently used features are removed.

    Attributes:
        num_encoded: the number of times that an encoder was run.
        num_reused: the number of times that stored features were used.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_encoded = 0
        self.num_reused = 0
        self._max_bytes = max_bytes
        # The stored features. The features that were used least recently come first.
        self._features: OrderedDict[_Key, Any] = OrderedDict()
        # The total size of the stored features.
        self._num_bytes = 0
        # The digest of the images that the model is processing, and the number of encoder calls for
        # these images so far. They are the key of the next features. Outside `used_for`, the digest
        # is None, and the cache is not used.
        self._digest: bytes | None = None
        self._num_calls = 0
        # Whether an encoder is running. If the encoder calls another cached method, this inner call
        # does not use the cache.
        self._is_encoding = False

    def install(self, model: Module) -> None:
        """Make the encoders of a model use the cache.

        The methods get_image_features, get_video_features and get_audio_features of the model and
        its modules are replaced by methods that first search the cache. If no module has the method
        get_audio_features, the method `forward` of the audio encoder is replaced instead.
        """
        replaced: set[str] = set()
        for module in model.modules():
            for name in _METHODS:
                method = getattr(module, name, None)
                if callable(method) and not _reads_text(method):
                    setattr(module, name, self._cached(method))
                    replaced.add(name)
        if isinstance(model, PreTrainedModel) and "get_audio_features" not in replaced:
            self._replace_audio_encoder(model)

    def _replace_audio_encoder(self, model: PreTrainedModel) -> None:
        """Replace the method `forward` of the audio encoder by a method that uses the cache.

        The model has no method `get_audio_features`, which could be replaced instead. If the model
        has no audio encoder, `get_encoder` returns the model itself, or the encoder of the text.
        """
        encoder: Any = model.get_encoder(modality="audio")
        if encoder is not model and not _reads_text(encoder.forward):
            encoder.forward = self._cached(encoder.forward)

    @contextmanager
    def used_for(self, digest: bytes) -> Iterator[None]:
        """Return a context manager. In its `with` block, the model uses the cached features.

        If no features are cached, they are computed and added to the cache. Outside the block, the
        cache is not used. `digest` is the hash of the images for which the model is run.
        """
        self._digest, self._num_calls = digest, 0
        try:
            yield
        finally:
            self._digest = None

    def _cached(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that replaces `method`, a method that computes image features.

        The function returns the stored features. If no features are stored, the function calls
        `method` and stores the result. The key of the features consists of the digest of the images
        and of the number of the encoder call. For the same images, a model always calls its
        encoders in the same order, so the number identifies the features.
        """

        # `wraps` copies the signature of `method`. transformers' `generate` reads the signature to
        # choose the arguments.
        @wraps(method)
        def get_features(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            # A cached method may call another cached method. Such an inner call does not use the
            # cache, so that only the result of the outer call is stored.
            if self._digest is None or self._is_encoding:
                return method(*args, **kwargs)
            key = _Key(self._digest, self._num_calls)
            self._num_calls += 1
            if key in self._features:
                return self._reuse(key)
            return self._encode(key, partial(method, *args, **kwargs))

        return get_features

    def _reuse(self, key: _Key) -> Any:  # noqa: ANN401 - the output of a model
        """Return a copy of stored features, because the model may change the returned object."""
        self.num_reused += 1
        self._features.move_to_end(key)
        return _copy(self._features[key])

    def _encode(self, key: _Key, encode: Callable[[], Any]) -> Any:  # noqa: ANN401 - the output of a model
        """Compute features by calling `encode`, store a copy of them, and return the features."""
        self._is_encoding = True
        try:
            features = encode()
        finally:
            self._is_encoding = False
        self.num_encoded += 1
        self._store(key, _copy(features))
        return features

    def _store(self, key: _Key, features: Any) -> None:  # noqa: ANN401
        """Store features, unless they are larger than the whole cache.

        If the cache becomes too large, remove the least recently used features.
        """
        num_bytes = _num_bytes(features)
        if num_bytes > self._max_bytes:  # Storing them would remove all other features.
            return
        self._features[key] = features
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._features.popitem(last=False)
            self._num_bytes -= _num_bytes(dropped)


def _reads_text(method: Callable[..., Any]) -> bool:
    """Return whether a method has the parameter `input_ids`.

    The result of such a method also depends on the text of the prompt. The keys of the cache do not
    depend on the text, so such a method must not be cached.
    """
    return "input_ids" in signature(method).parameters


def _copy(features: Any) -> Any:  # noqa: ANN401 - the output of a model
    """Return a shallow copy of the output of an image encoder.

    A model may replace fields of the returned output, but the stored output must not change.
    """
    # An output is a tensor, a list, a tuple, or an object of ModelOutput, a subclass of dict.
    return copy(features) if isinstance(features, dict | list) else features


def _num_bytes(value: Any) -> int:  # noqa: ANN401 - the output of a model
    """Return the total number of bytes of all tensors in a value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_num_bytes(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(_num_bytes(part) for part in value)
    return 0
