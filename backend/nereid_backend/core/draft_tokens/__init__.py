# SPDX-License-Identifier: Apache-2.0
"""Draft tokens for speculative decoding: their source and their number."""
