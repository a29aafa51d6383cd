"""Benchmarks: what this machine can do, what longhelix makes of it, and what its peers do beside it."""
