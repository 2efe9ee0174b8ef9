"""Conversations: messages as clients send them, the chat template, control tokens, and how models write calls."""
