"""Sandboxes: isolated machines in which tools and graders run programs that nobody has read."""
