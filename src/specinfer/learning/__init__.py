"""One training loop, and what it trains: drafters, offline (`tune`) and in service (`adapt`), and policy networks."""
