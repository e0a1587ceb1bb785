# SPDX-License-Identifier: Apache-2.0
"""Validation and tokenisation of the inputs of pooling models. Images become tensors."""
