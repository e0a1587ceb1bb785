# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: masks, penalties, random sampling and log-probabilities."""
