"""Environments: tasks, tools, sandboxes and graders that keep the promises in `composer.contract`."""
