"""Status, cost and records for people and programs, and downloads of files."""
