"""The process on each host: it starts, restarts, records and stops the trainer of a job."""
