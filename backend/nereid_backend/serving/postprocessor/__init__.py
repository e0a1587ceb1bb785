# SPDX-License-Identifier: Apache-2.0
"""The Triton model `postprocessor`."""
