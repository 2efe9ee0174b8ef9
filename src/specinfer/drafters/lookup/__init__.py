"""Drafters that look tokens up: in the text of a request, in past outputs, in a prediction."""
