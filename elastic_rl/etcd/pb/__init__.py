"""Messages of the etcd v3 calls that we use. ``etcd_pb2.py`` and its types are generated: ``bash ops/gen_stubs.sh``."""
