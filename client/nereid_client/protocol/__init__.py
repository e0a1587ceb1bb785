"""Wire types of the HTTP API."""
