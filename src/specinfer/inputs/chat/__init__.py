"""Conversations: clients' messages, the chat template, control tokens, and models' formats of tool calls."""
