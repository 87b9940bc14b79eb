"""Beside the floors: the real scheduler and cache on a virtual clock.

`Simulation` runs a workload from a seed, with faults, and proves every invariant after every step; `replay` does a
recorded run again. Nothing here reads the time, the environment or anything else that would make two runs differ.
"""
