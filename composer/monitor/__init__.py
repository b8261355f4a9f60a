"""The cheat monitor: what an episode did to get its reward by other means than work, and what follows from it.

It sees what the agent said, called and was answered, and how the files changed; it never sees what that was worth.
"""
