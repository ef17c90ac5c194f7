"""Run on the VMs: the agent, the model server, a batch prediction, the tuner."""
