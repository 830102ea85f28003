"""elastic-rl: a service that keeps an LLM reinforcement-learning run going while its machines fail under it."""

import os

__version__ = "0.1.0"

# Read once, when gRPC is first imported. Our children are exec'ed right after the fork and never use gRPC's state, and
# its fork handlers, run in a process with open channels, can close descriptors that the child needs.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# It prints each handshake that fails, such as with a cluster that is being taken down: whoever called is told.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
