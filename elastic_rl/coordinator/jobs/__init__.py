"""Jobs of the cluster: their queue and their phases."""
