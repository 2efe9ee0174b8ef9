"""Several processes: groups of ranks, and each rank's share of a target."""
