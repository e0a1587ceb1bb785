"""Triton server glue: what model.py files call."""
