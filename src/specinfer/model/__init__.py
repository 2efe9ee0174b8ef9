"""The model, its KV cache, and the batch that one forward pass reads: tokens in, logits out."""
