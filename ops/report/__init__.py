"""`fab report`: an HTML page of a job, or of several side by side; `fab bundle`: a file with the evidence of a job."""
