"""Runs ranks as processes: starts them, sends them steps, watches them and ends them."""
