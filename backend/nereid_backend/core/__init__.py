"""Scheduling, blocks and requests in plain Python: no torch below this line."""
