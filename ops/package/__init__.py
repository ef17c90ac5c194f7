"""A trainer package: found, read, built with the dependencies that the hosts lack, and packed."""
