"""One decoder; its parameters, declared once; the checkpoints that they are read from."""
