"""``train.schedule: fully_async``: the two sides, generating and training, the flow between them, and the queues."""
