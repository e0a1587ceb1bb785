"""Conversion of the postprocessor's deltas to completions, chunks and server-sent events."""
