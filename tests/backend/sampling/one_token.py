"""A helper that samples one token for each request without an engine."""

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.sampler import Sampler
from torch import Tensor


def sample(logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Sample one token for each request, without guides, draft tokens or cached state.

    Args:
        logits: a tensor of any float dtype with the shape [num_requests, vocab_size]. The call does
            not change it.
        sequences: the sequence of each row of `logits`. The call does not append the new tokens.

    Returns:
        One result for each request. The result contains an error if no token could be sampled.
    """
    sampled_tokens = Sampler().sample(logits, [Position(sequence, []) for sequence in sequences])
    return [
        Sampled([], [], sampled_tokens.errors[index])
        if index in sampled_tokens.errors
        else Sampled(
            [sampled_tokens.token_ids[index]],
            [sampled_tokens.logprobs[index]],
            top=[sampled_tokens.top[index]] if index in sampled_tokens.top else None,
        )
        for index in range(len(sequences))
    ]
