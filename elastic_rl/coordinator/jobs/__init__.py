"""Jobs of the cluster: what a replica does for each of them, their queue and their phases."""
