"""The engine loop: scheduling, the size of draft trees, and one step after the other."""
