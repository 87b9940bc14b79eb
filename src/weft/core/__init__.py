"""Floor 1: requests, sampling parameters, plans, errors, clock. Standard library and numpy only."""
