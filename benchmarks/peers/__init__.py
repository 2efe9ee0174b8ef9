"""Other inference engines, measured on the same weights in the same run as ours, each in its own process."""
