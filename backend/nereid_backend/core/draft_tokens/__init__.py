# SPDX-License-Identifier: Apache-2.0
"""Draft tokens for speculative decoding: the source and the number of the draft tokens."""
