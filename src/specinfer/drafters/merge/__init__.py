"""Merging of several drafters into one tree, and the choice of drafters for a request."""
