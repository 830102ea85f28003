"""The model, its parallel group and optimizer, through megatron-core."""
