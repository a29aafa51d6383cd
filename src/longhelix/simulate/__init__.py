"""Simulate serving over time. A simulation runs the engine's loop and scheduler, but predicts the step times."""
