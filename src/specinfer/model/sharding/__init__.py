"""Targets that several ranks compute: stages of layers, and shards of each layer."""
