"""Learning for drafters: examples from the target, the distillation loss, and adaptation while they are served."""
