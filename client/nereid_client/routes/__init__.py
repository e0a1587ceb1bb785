"""The routes of the HTTP API, one module for each URL path or group of paths."""
