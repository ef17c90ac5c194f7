"""`fab report` and `fab bundle`: a job, or several side by side, as one HTML file; the evidence of a job as a tar.gz."""
