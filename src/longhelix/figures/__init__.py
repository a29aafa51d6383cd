"""Reproduces the Helix (arXiv 2507.07120) and Medha (arXiv 2409.17264) papers with the performance model."""
