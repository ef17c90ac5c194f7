"""Between-graph replication with parameter servers, as a trainer for Cloud ML was written in 2017."""
