"""Drafters whose vocabulary differs from that of the target."""
