"""Measurements of the running system: what is timed, on what, and how it is shown."""
