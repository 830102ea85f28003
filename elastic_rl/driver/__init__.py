"""The driver: makes Ray equal to what etcd says. It decides nothing; restarted, it begins a new epoch."""
