"""The sampling kernel's arithmetic by its definition: sorted and summed up, row by row."""

import numpy as np
import torch

LARGEST_SHARE = 2**40


def settings_of(*rows):
    """Rows of (temperature, top_p, top_k, min_p, uniform) as the kernel takes them."""
    return np.array(rows, dtype=np.float64).T.copy()


def shares_of(logits, temperature):
    """Weights of a row as float32 and as whole 2 ** -40ths."""
    factor = np.float32(1.4426950408889634) / np.float32(temperature)
    greatest = np.float32(np.nanmax(logits))
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        weights = np.exp2((logits - greatest) * factor)
    weights[np.isnan(logits)] = 0
    return weights, np.floor(weights.astype(np.float64) * LARGEST_SHARE).astype(np.int64)


def kept_of(weights, shares, top_p, top_k, min_p):
    """Which tokens min_p, top_k and top_p keep, in this order; ties with the last one stay."""
    kept = (weights >= np.float32(min_p)) & (weights > 0)
    if 0 < top_k < len(weights) and kept.sum() > top_k:
        kept &= weights >= np.sort(weights[kept])[::-1][top_k - 1]
    if top_p < 1:
        order = np.argsort(-weights[kept], kind="stable")
        above = np.cumsum(shares[kept][order]) - shares[kept][order]
        wanted = max(1.0, np.ceil(float(np.float32(top_p)) * float(shares[kept].sum())))
        # Whoever ties with the last of the nucleus has no more above it than that one.
        last = weights[kept][order][np.flatnonzero(above < wanted)[-1]]
        kept &= weights >= last
    return kept


def sample(logits, raw, settings):
    """Token ids, log-probabilities and whether a choice was possible, as lists."""
    found = []
    rows = zip(logits.float().numpy(), raw.float(), settings.T, strict=True)
    for row, own, (temperature, top_p, top_k, min_p, uniform) in rows:
        is_finite = bool(own.log_softmax(-1).isfinite().any())
        token = int(np.where(np.isnan(row), -np.inf, row).argmax())
        if temperature > 0 and is_finite and np.nanmax(row) > -np.inf:
            weights, shares = shares_of(row, temperature)
            shares = np.where(kept_of(weights, shares, top_p, int(top_k), min_p), shares, 0)
            cumulated = shares.cumsum()
            target = min(int(uniform * float(cumulated[-1])), int(cumulated[-1]) - 1)
            token = int(np.searchsorted(cumulated, target, side="right"))
        logprob = float(own.log_softmax(-1)[token]) if is_finite else float("nan")
        found.append((token, logprob, bool(row[token] > -np.inf)))
    token_ids, logprobs, has_allowed = zip(*found, strict=True)
    return list(token_ids), torch.tensor(logprobs), list(has_allowed)
