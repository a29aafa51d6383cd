"""One rank: it turns steps into tensors, runs the model, and chooses tokens."""
