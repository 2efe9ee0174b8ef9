"""Targets larger than memory, against the disk and other engines."""
