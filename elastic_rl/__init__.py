"""elastic-rl: a service that keeps an LLM reinforcement-learning run going while its machines fail under it."""

__version__ = "0.1.0"
