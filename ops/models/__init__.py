"""What a job made of its model: exported, and shown in TensorBoard."""
