"""Measuring on ranks of their own: jobs, the worlds that run them, and how they are timed."""
