"""What one rank computes: its share of the model, of the KV cache and of the exchanges."""
