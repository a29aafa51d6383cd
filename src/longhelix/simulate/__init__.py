"""Requests over time, served by the engine's own loop and scheduler over a predicted runner and its clock."""
