"""Checkers: pure functions over the log of a run, by the rules of docs/architecture.md. ``judge`` runs them all.

Where each rule is judged:

- run: ``faults.WorthSomething``, ``watches.ObservedOrder``, ``histories.KnownModels``, ``training.WholeRun``
- I1: ``leadership``, ``fencing``, ``assignments``, ``lifecycles.Idempotency`` and ``.Routable``, ``versions.Epochs``,
  ``watches.Watches``, ``histories``
- I2: ``versions.Commits`` and ``.Heads``
- I3: ``versions.States``, ``.Numbers``, ``.Heads``, ``.Pins``, ``.KeptVersions`` and ``.Commits``,
  ``training.CommittedVersions``, ``histories``
- I4: ``training.TrueWeights`` and ``.NamedVersions``, ``weights.Checksums`` and ``.VersionsOfSamples``,
  ``lifecycles.Engines`` and ``.Routable``
- I5: ``training.TrainedOnce``, ``weights.StatedStaleness``, ``groups``
- I6: ``running.PoolSizes``
- I7: ``training.SameAsBaseline``
- I8: ``faults.Leftovers``
- I9: ``faults.Alerts``, with ``attribution``; ``lifecycles.AlertStates``
- I10: ``faults.Recoveries``, ``recoveries``, ``running.OpenOperations``, ``ending.Answered``,
  ``lifecycles.Operations``, ``histories``
- I11: ``faults.SaidWhatItWaitsFor``, ``training.WholeRun``, ``ending.LastSteps``, ``lifecycles.Jobs``
- I12, I13, I15: ``running.Singletons``, ``.Decisions`` and ``.KeptAfterStop``
- I14: ``faults.SlowWork``
- growth: ``growth.NothingGrows``
"""
