"""Floor 3: who runs next. No torch, no I/O; `Scheduler.plan()` and `Scheduler.apply(plan, result)`."""
