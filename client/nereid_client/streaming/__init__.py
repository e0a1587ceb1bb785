"""Conversion of the deltas of the postprocessor to chunks, server-sent events and completions."""
