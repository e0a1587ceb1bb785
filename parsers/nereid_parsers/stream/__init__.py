"""The incremental machine that executes a Format. Start at parser.py."""
