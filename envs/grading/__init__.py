"""Graders: what the final state of an episode is worth."""
