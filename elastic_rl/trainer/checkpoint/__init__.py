"""The state of the group: published to the checkpoint service, and restored from it."""
