"""What replicas print: read, followed, merged in the order of time."""
