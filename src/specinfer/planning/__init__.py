"""specinfer plan: trees that auto chooses on this machine, and splits of a target over simulated machines."""
