"""The report of a chaos run: report.json, and report.html as one self-contained file."""

from chaos_tests.report.build import read, write

__all__ = ["read", "write"]
