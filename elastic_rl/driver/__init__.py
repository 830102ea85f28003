"""The driver: makes Ray equal to what etcd says. It decides nothing; killed, it is started again under a new epoch."""
