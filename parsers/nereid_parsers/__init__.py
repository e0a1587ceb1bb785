"""Chat formats as data: parse, stream and constrain what language models write."""
