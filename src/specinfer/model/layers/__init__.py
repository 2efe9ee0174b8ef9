"""Decoder layers: families as data, the plan of a layer, and the decoders that compute plans on CPUs and on GPUs."""
