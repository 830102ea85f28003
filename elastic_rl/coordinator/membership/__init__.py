"""Who takes part in a job: the registry of members that were seen, dead and hung members, weight outliers."""
