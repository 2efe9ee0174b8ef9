"""Several processes: groups of ranks, and each rank's shard of a target."""
