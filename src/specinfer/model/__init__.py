"""Tokens in, logits out: the model, its cache, and the batch that one forward pass reads."""
