"""One rank: steps become tensors, the model runs, tokens are chosen."""
