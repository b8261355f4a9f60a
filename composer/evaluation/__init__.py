"""Evaluation on unseen tasks: metrics (pure) and the stage that runs the episodes."""
