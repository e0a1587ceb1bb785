"""The reference implementation of the sampling kernel, which sorts and sums each row with numpy."""

import numpy as np
import torch

# The kernel adds weights as integers, without rounding. The weight 1 is this integer.
LARGEST_SHARE = 2**40


def settings_of(*rows):
    """Return the array of settings for the kernel.

    Each row of logits has a tuple (temperature, top_p, top_k, min_p, uniform random number).
    """
    return np.array(rows, dtype=np.float64).T.copy()


def shares_of(logits, temperature):
    """Return the weights of the tokens of a row as float32, and as integers in units of 2 ** -40.

    The likeliest token has the weight 1.
    """
    log2_of_e = np.float32(1.4426950408889634)
    factor = log2_of_e / np.float32(temperature)
    largest_logit = np.float32(np.nanmax(logits))
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        weights = np.exp2((logits - largest_logit) * factor)
    weights[np.isnan(logits)] = 0
    return weights, np.floor(weights.astype(np.float64) * LARGEST_SHARE).astype(np.int64)


def remaining_tokens(weights, shares, top_p, top_k, min_p):
    """Return a mask of the tokens that remain after min_p, top_k and top_p, applied in this order.

    Tokens with the same weight as the last remaining token also remain.
    """
    remains = (weights >= np.float32(min_p)) & (weights > 0)
    if 0 < top_k < len(weights) and remains.sum() > top_k:
        remains &= weights >= np.sort(weights[remains])[::-1][top_k - 1]
    if top_p < 1:
        order = np.argsort(-weights[remains], kind="stable")
        ordered_shares = shares[remains][order]
        sum_of_likelier_tokens = np.cumsum(ordered_shares) - ordered_shares
        limit = max(1.0, np.ceil(float(np.float32(top_p)) * float(ordered_shares.sum())))
        # The last remaining token is the first token at which the sum of the shares reaches the
        # limit.
        last = np.flatnonzero(sum_of_likelier_tokens < limit)[-1]
        remains &= weights >= weights[remains][order][last]
    return remains


def sample(logits, raw, settings):
    """Return the same results as `gpu_sampling.sample`."""
    results = []
    rows = zip(logits.float().numpy(), raw.float(), settings.T, strict=True)
    for row, raw_row, (temperature, top_p, top_k, min_p, uniform) in rows:
        is_finite = bool(raw_row.log_softmax(-1).isfinite().any())
        token = int(np.where(np.isnan(row), -np.inf, row).argmax())
        if temperature > 0 and is_finite and np.nanmax(row) > -np.inf:
            weights, shares = shares_of(row, temperature)
            remains = remaining_tokens(weights, shares, top_p, int(top_k), min_p)
            cumulated = np.where(remains, shares, 0).cumsum()
            target = min(int(uniform * float(cumulated[-1])), int(cumulated[-1]) - 1)
            token = int(np.searchsorted(cumulated, target, side="right"))
        logprob = float(raw_row.log_softmax(-1)[token]) if is_finite else float("nan")
        has_allowed_token = bool(row[token] > -np.inf)
        results.append((token, logprob, has_allowed_token))
    token_ids, logprobs, has_allowed = zip(*results, strict=True)
    return list(token_ids), torch.tensor(logprobs), list(has_allowed)
