# SPDX-License-Identifier: Apache-2.0
"""The Triton model `postprocessor`. It converts token ids to text, messages and tool calls."""
