"""Rules for every stack: pure functions, and a pack that Pulumi runs."""
