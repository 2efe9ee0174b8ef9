"""More than one process: groups of ranks, and what each of them holds of a target."""
