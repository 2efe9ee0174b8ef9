"""Tuning of drafters: collective boost-tuning to a target, and training of the scheduler's predictor."""
