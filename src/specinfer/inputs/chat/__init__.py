"""Conversations: clients' messages, the chat template, and control tokens in clients' texts."""
