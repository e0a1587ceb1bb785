"""The `nereid` command."""
