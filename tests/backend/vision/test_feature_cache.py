"""Tests of the cache of image features: its size, and the order in which features are removed."""

import torch
from nereid_backend.vision.forward.feature_cache import FeatureCache
from torch import Tensor, nn


class Encoder(nn.Module):
    """A fake encoder that returns one feature for each pixel."""

    def get_image_features(self, num_pixels: int) -> Tensor:
        return torch.zeros(num_pixels)


def test_features_that_are_larger_than_the_cache_do_not_remove_the_others():
    encoder = Encoder()
    cache = FeatureCache(max_bytes=4 * 100)
    cache.install(encoder)
    for digest, num_pixels in ((b"small", 10), (b"large", 101), (b"full", 90), (b"small", 10)):
        with cache.used_for(digest):
            assert len(encoder.get_image_features(num_pixels)) == num_pixels
    assert (cache.num_encoded, cache.num_reused) == (3, 1)


def test_the_features_that_were_not_used_for_the_longest_time_are_removed_first():
    encoder = Encoder()
    cache = FeatureCache(max_bytes=4 * 100)
    cache.install(encoder)
    for digest in (b"a", b"b", b"a", b"c", b"a", b"b"):
        with cache.used_for(digest):
            encoder.get_image_features(50)
    assert (cache.num_encoded, cache.num_reused) == (4, 2)
