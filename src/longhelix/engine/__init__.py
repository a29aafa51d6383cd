"""The running system: `LLM` and the processes of its ranks."""
