"""Measurements on separate rank processes: jobs, the worlds that run them, and timing."""
