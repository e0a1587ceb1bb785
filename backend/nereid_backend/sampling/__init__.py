# SPDX-License-Identifier: Apache-2.0
"""Turns logits into tokens: token masks, penalties, random sampling and log-probabilities."""
