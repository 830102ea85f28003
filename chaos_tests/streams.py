"""The streams of a job in a run, whose heads are looked at when it has ended."""

from __future__ import annotations

from elastic_rl.config import Stream

OF_PROGRAMS = "chaos"
"""The stream of the programs beside the job (``chaos_tests.traffic.stream_programs``)."""
STREAMS = (Stream.POLICY, Stream.TRAINER_STATE, OF_PROGRAMS)
"""A job is exported and resumed from the heads of the first two."""
