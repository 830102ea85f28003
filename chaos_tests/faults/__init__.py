"""The faults that a schedule can have, by name. What they do is in ``elastic_rl.faults``, which ``train --faults`` and
the benchmarks use too."""
