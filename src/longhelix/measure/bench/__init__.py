"""Benchmarks of this machine, of longhelix and of other engines."""
