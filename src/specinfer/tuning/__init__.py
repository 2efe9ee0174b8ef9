"""Tuning: drafters boost-tuned to a target, and the training of speculation policies."""
