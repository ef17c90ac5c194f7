"""The fixtures of tests whose replicas are processes."""

from replicahosts import make

__all__ = ["make"]
