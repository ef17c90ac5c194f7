"""A trainer in a project with a pyproject.toml and dependencies."""
