"""Values in the bodies of tool calls: their types, JSON and Python literals, wrapped arguments."""
