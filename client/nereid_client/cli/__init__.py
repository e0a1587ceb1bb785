"""The `nereid` command. START HERE: main.py."""
