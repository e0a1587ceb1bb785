"""Convert the member `response_template` of a tokenizer_config.json into a Format."""
