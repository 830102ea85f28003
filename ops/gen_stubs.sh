#!/usr/bin/env bash
# Generates the etcd messages from our .proto; the result is checked in, so only a change of the .proto needs this.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
"$python" -m grpc_tools.protoc -I. --python_out=. --pyi_out=. elastic_rl/etcd/pb/etcd.proto
"$python" -c "from elastic_rl.etcd.pb import etcd_pb2; print('generated', etcd_pb2.DESCRIPTOR.name)"
