"""The models of jobs: exported, deployed, asked for predictions, and shown in TensorBoard."""
