"""Megatron-core backend: parallel setup, model, optimizer, train step, HF layout, checkpoint state, elastic agent."""
