# SPDX-License-Identifier: Apache-2.0
"""The formats of quantised safetensors checkpoints, such as GPTQ and AWQ. Each has one module."""
