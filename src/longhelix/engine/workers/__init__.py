"""Ranks as processes: started, given steps, watched, and ended."""
