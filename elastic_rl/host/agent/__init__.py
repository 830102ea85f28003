"""The host agent: one detached process a host that keeps the services of its cluster running, whoever started them."""
