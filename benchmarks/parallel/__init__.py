"""Targets split over processes and hosts."""
