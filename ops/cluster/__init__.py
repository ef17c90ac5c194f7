"""One cluster that is up: its hosts, the connections to them, its bucket."""
