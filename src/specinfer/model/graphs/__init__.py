"""Passes at captured sizes: inputs padded to shapes of a small set, so that CUDA graphs replay them."""
