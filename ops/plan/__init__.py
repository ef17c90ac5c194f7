"""Predict a job's throughput on a scale tier before it runs, and compare it after."""
