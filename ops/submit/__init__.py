"""A job, from its flags to running replicas: its definition, each host's files, its start and its end."""
