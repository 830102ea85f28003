"""Prompts, their order, and the ledger of the prompt groups that were trained on."""
