"""The control plane: truth in etcd, one leader that compares desired with actual, and the admin API."""
