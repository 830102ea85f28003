"""Members of a job: the registry of those that were seen, dead and hung members, weight outliers."""
