"""Targets larger than memory: what of a decoder layer is not held, and how it comes in ahead of its use."""
