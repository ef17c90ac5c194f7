"""Rules for every stack on Google Cloud: pure functions, and a policy pack that Pulumi runs."""
