"""Ranks as processes: started, told, watched, ended."""
