"""Starts the servers, watches them, starts them again, drains and ends them."""
