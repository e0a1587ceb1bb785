"""The classes that read the body of a tool call: JSON, Python calls, or values between tags."""
