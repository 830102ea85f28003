"""The host agent: two detached processes of a host, one active and one its standby, that keep the services of its
cluster running, whoever started them."""
