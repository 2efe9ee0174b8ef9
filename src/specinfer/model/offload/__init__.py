"""Offloading for targets larger than memory: decoder layers are brought in ahead of their use."""
