"""Faults, cancellations and long runs, and what clients see of them."""
