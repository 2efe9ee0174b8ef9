"""Drafters in processes of their own."""
