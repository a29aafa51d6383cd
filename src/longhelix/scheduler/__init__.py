"""Which tokens run next: the scheduler makes Steps, the loop carries them over a Runner. Pure."""
