# SPDX-License-Identifier: Apache-2.0
"""Functions that turn logits into tokens: masks, penalties, sampling and log-probabilities."""
