# SPDX-License-Identifier: Apache-2.0
"""The forward paths: how the tokens of one step go through a model."""
