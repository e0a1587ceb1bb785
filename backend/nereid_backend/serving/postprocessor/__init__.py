# SPDX-License-Identifier: Apache-2.0
"""The Triton model `postprocessor`, which turns token ids into text, messages and tool calls."""
