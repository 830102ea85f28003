"""The report of a chaos run: report.json, and report.html as one self-contained file."""

from chaos_tests.report.build import BASELINE, EVENTS, PAGE, Judged, arguments, read, reproduce, write

__all__ = ["BASELINE", "EVENTS", "PAGE", "Judged", "arguments", "read", "reproduce", "write"]
