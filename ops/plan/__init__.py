"""How quick a job would be on a scale tier, told before it runs and checked after."""
