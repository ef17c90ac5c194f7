"""The process that runs on each host: starts the trainer, restarts it, records it, and stops it with its job."""
