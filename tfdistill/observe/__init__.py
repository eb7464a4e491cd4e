"""What a training writes for people: metrics.jsonl and TensorBoard."""
