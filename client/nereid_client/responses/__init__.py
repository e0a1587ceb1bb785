"""OpenAI's Responses API: items in, a conversation of chat messages; deltas back, items out.

A request goes: routes/responses.py -> items.py (read the input) -> translate.py (say it as a chat
completion) -> the ensemble -> answer.py (deltas to items and events) -> store.py (what is kept).
"""
