"""Calibration: measures this machine, and creates the system `local` from the measurements."""
