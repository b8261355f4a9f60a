"""Rollouts: the chat format, the agent loop, episodes, and the engine that generates."""
