"""Checkpoints: compressed-tensors out, complete or not at all."""
