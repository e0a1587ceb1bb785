"""The `nereid` command. START HERE: application.py."""
