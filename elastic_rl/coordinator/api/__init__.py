"""The admin API: every replica answers reads from etcd and hands changes on to the leader."""
