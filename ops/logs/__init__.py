"""The logs of replicas: read, followed, merged in the order of time."""
