"""The patterns of a format that the stream parser searches for. They are compiled only once."""
