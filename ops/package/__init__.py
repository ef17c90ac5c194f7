"""Find, build, check and pack trainer packages, with the dependencies that the hosts lack."""
