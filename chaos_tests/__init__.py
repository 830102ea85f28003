"""The chaos suite: real processes, real faults, and checkers that judge what happened by the rules I1 to I15 of
docs/architecture.md ("What always holds"), by ``run`` (whether the run is worth anything) and by ``growth``.

A run (``runner``) plays a schedule (``nemesis.schedule``) of faults (``faults.catalogue``, which are
``elastic_rl.faults``) against a job (``target``, ``target_hosts``), while clients go on (``traffic``, which writes a
``history``) and an ``observer``, which is independent of the product's own client, sees what changes in etcd. Their
threads append to one log (``event_log``). Only ``validate`` and ``report`` read it: pure checkers, which can judge the
same log again, anywhere. Each fault has a witness that it happened.

In the order of reading:

- ``scenarios``: what can be run, with which faults, traffic and length;
- ``nemesis.schedule``: which faults happen when, drawn from a seed;
- ``faults.catalogue``: each fault by its name, and what it strikes;
- ``runner``, ``target``, ``target_hosts``, ``abort``, ``blast_radius``: a run, on a cluster of its own or on yours;
- ``collectors``, ``results``, ``provenance``, ``kept_job``: what of a run goes into its log and its folder, and what
  comes out of it;
- ``traffic``, ``history``, ``model``: clients, what they were told, and the sequential models that judge that;
- ``event_log``, ``observer``, ``receiver``, ``sampler``: what is written down;
- ``validate``, ``report``: what is made of it. ``validate`` says which rule is judged where;
- ``sim``: the product's state machines in simulated worlds, without any real part, and the bugs planted in them.
"""
