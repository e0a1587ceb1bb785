"""OpenAI's Responses API.

A request passes through these modules:

1. input_items.py        reads and checks the items of `input`
2. chat_translation.py   translates the request to a chat completion
3. response_builder.py   converts the deltas of the chat completion to items and events
4. response_store.py     stores the response, so that it can be retrieved and continued;
                         stored_response.py declares the records of the store

background_responses.py generates responses without an open connection, and truncation.py removes
the oldest turns of a conversation that is too long.
"""
