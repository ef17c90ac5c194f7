"""Predict a job's throughput on a scale tier, and compare the prediction with the job's log."""
