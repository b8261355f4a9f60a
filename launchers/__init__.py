"""Launchers: how a Ray cluster comes to be and how the driver gets there."""
