"""Real checkpoints: what their configs say, what their tensors are, and one layer at a time from them."""
