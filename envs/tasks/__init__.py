"""Tasksets: deterministic sequences of tasks."""
