"""Pass times by rows, with and without native kernels."""
