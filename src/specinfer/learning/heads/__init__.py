"""Heads on the target's hidden states in training."""
