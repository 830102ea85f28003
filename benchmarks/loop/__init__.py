"""The training loop beside TRL and the Trainer of transformers."""
