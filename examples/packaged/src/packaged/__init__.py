"""A trainer that is a project with dependencies."""
