"""A job, from its flags to replicas that run: what it is, what each host receives, its start and its end."""
