"""Weights from the trainer to the generators: publish a version, load it in place, verify it."""
