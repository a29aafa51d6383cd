"""Measurements in rank processes: measurement jobs, the worlds of ranks that run the jobs, and timing."""
