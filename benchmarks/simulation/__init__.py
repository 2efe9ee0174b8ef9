"""Prediction of the speed of a target split over machines that are not here."""
