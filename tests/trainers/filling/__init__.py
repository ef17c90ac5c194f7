"""A trainer that writes to its host's disk until there is no room left."""
