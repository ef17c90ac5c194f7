"""Read and follow the logs of replicas, merged by time."""
