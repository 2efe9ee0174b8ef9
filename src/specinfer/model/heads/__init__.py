"""Heads: decoder layers that read the target's hidden states and predict its next tokens, in the public formats."""
