"""Drafters that learn: collective boost-tuning to a target, and the scheduler's predictor."""
