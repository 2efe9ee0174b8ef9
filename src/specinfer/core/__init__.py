"""Values that every layer shares: trees, requests, sampling parameters, noise, settings, errors, outputs."""
