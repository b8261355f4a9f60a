"""Composer: describe a specialised agentic model in config, check the plan, run it."""

__version__ = "0.1.0"
