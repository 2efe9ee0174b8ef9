"""Online adaptation: drafters learn from the traffic while the engine is idle."""
