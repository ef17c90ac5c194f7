"""`fab report`: a job, or several side by side, as one page that needs nothing else."""
