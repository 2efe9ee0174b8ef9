"""Prompts and conversations, turned into token ids."""
