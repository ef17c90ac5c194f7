"""The operations behind `fab`: hosts, jobs, the files of each host, and all views of a job."""
