"""Formats of what models write besides plain answers: tool calls and thoughts; their parser and their grammar."""
