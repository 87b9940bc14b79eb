"""Floor 4: what computes a step. Backends load through `registry`, on first use only."""
