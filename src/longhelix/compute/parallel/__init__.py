"""Ranks that work together: groups, collectives, and the exchange of partial attention."""
