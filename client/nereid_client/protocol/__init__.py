"""Request bodies of the HTTP API: their fields, types and limits."""
