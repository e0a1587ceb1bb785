# SPDX-License-Identifier: Apache-2.0
"""Proposes draft tokens for speculative decoding, and chooses the number of draft tokens."""
