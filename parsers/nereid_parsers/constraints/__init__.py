"""Constrained decoding: build the grammar that a model's output must match.

`constrain.py` builds the structural tag, which is the grammar in the form that xgrammar reads. The
other modules build its parts, and rewrite JSON schemas that xgrammar cannot enforce as they are.
"""
