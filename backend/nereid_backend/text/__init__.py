"""What the postprocessor does with tokens: text, stops."""
