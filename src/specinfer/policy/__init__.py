"""Speculation policies: how many tokens to draft in a step, from costs and acceptance probabilities."""
