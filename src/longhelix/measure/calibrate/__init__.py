"""Calibration: this machine measured, and the system "local" made of it."""
