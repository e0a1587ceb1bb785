"""The incremental parser that executes a Format. Start reading at parser.py."""
