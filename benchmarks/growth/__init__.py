"""Growth of small models to realistic sizes: the same text at the cost of a larger model."""
