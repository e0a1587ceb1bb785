# SPDX-License-Identifier: Apache-2.0
"""Replays steps as CUDA graphs, which replace the launches of many kernels.

decode_graphs.py      one graph for each decode step
piecewise_graphs.py   several graphs for each step with prefills
cuda_capture.py       captures the graphs
"""
