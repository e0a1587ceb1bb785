"""One file per endpoint: decode, call, encode."""
