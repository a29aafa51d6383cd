"""What a step costs: time of every op and collective on a system, memory of every rank, prefill, predictions."""
