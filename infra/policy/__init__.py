"""What no stack of ours may do, whoever edits it: pure rules, and a pack that Pulumi runs."""
