"""The process group of the trainer under torch elastic: its agent, rendezvous and watch."""
