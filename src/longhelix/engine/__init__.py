"""The running system: LLM and the processes behind it."""
