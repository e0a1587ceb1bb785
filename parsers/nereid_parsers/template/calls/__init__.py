"""Infer how a template writes tool calls: one reader for each form of tool calls.

Start at `call_forms.py`, which lists the readers.
"""
