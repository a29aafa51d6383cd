"""Benchmarks of this machine, longhelix and other engines."""
