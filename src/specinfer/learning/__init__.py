"""What drafters learn from: examples of the target, the loss, and adaptation while they are served."""
