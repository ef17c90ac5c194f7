"""What `fab` does: who is where, what runs, the files of each host, and everything that reads a job."""
