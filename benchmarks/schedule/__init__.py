"""Ways to choose how far to speculate, on a mixed workload."""
