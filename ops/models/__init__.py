"""Export models of jobs, deploy them, request predictions, and show jobs in TensorBoard."""
