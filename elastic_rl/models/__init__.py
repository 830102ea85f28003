"""The model families that the trainer and the engines take: what their config.json says, and how their tensors are laid
out. Without torch, so that a model folder can be checked before any process starts."""
