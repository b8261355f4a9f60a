"""The Docker backend: each sandbox is a container of an engine, on this machine or another."""

from envs.sandbox.docker.backend import DockerBackend

__all__ = ["DockerBackend"]
