"""Layers that mix tokens by a convolution or a recurrence instead of attention, on token trees."""
