"""The incident room: eleven bugs of real schedulers, each rebuilt, exposed by a test, and fixed.

Phase 7 builds it. `bases` has the engines that the bugs happened in, without the bugs; `broken` has the eight, each a
few lines on one of those; `case_1_cap` … `case_8_copy` have, for each, the test that exposes it and the fix; `table`
lists them all, with the smallest workload that shows each, and counts what it does there. Phase 12 builds three more,
of schedulers that run one step ahead: `async_bases`, `async_broken`, and `case_9_freed` … `case_11_receiver`. Pure
standard library.
"""
