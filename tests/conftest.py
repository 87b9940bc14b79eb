"""Shared by all tests: a fixed hypothesis profile, so that the suite is the same every time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "weft",
    derandomize=True,
    deadline=None,  # timings never decide a test
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    database=None,
)
settings.load_profile("weft")
