"""Measurements of SpecInfer that its users do not need: of its parts, and against other engines."""
