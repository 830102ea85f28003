"""The control plane beside torchft's lighthouse."""
