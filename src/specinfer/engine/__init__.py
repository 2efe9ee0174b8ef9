"""The loop: who runs, how far to guess, one step after the other."""
