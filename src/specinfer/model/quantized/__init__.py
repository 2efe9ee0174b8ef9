"""Checkpoints whose weights are quantized already: compressed-tensors, AWQ, GPTQ, FP8."""
