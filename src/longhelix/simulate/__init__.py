"""Simulate serving over time. The simulation runs the engine's own loop and scheduler with predicted step times."""
