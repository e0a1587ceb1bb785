"""Reads tool calls in a stream: their start, their end, and the text between two tool calls.

The text of a tool call between its markers is read by `nereid_parsers.stream.bodies`.
"""
