"""The decoder, the declaration of its parameters, and the checkpoints that they are read from."""
