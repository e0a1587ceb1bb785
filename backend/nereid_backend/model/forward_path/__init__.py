# SPDX-License-Identifier: Apache-2.0
"""Chooses the forward path of a model: the fastest way to run the model with correct logits."""
