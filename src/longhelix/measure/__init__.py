"""Measurements in rank processes: the jobs to run, the groups of rank processes that run them, and timing."""
