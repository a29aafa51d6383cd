"""Builds pages. Each page is one self-contained HTML file."""
