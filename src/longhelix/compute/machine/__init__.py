"""What this machine has: cores, memory, GPUs, and what it is as a system."""
