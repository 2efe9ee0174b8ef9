"""Assembly of an engine: target, drafters and policy, from names and settings."""
