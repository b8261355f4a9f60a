"""Reinforcement learning: advantages, loss and packing (pure), and the trainer, ledger and controller around them."""
