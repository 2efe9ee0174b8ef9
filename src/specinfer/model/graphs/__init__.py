"""CUDA graphs of forward passes: inputs are padded to few shapes, so that captured graphs can be replayed."""
