"""Runs ranks as processes. It starts the processes, sends steps to them, watches them and ends them."""
