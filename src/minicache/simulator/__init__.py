"""Workloads, and what a memory policy does with them, step by step. Pure Python; first used in phase 2.

`workload` makes requests: when they arrive and how long they are. `memory_use` serves them from a memory of slots and
tells at every step where the slots are. `serving` has schedulers serve them on a clock, and `prompts` makes requests
that begin as others do.
"""
