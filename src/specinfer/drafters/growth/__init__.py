"""Growth of a token tree from the logits of a small model."""
