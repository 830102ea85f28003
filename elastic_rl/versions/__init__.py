"""For people: looking at versions in the checkpoint service, comparing, checking, keeping, taking them out and in."""
