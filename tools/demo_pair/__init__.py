"""Training of the embedded pair of models, and the packing of their weights into the package."""
