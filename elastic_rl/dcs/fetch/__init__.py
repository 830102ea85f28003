"""Getting a version: the fetch scheduler, its transfers between nodes, and the puller."""
