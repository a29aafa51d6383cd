"""Simulate serving over time: the engine's own loop and scheduler with predicted step times."""
