"""Anthropic's Messages API.

A request passes through these modules:

1. messages_request.py   declares the fields of the body and checks them
2. content_blocks.py     reads the blocks of the conversation, and converts them to chat messages
3. chat_translation.py   translates the request to a chat completion
4. message_builder.py    converts the deltas of the chat completion to blocks and events

The fields follow version 2.12 of Anthropic's Python client.
"""
