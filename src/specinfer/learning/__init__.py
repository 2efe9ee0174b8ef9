"""What drafters learn from: lessons of the target, the loss, and adaptation while they are served."""
