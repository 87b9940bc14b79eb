"""A backend without a model: deterministic tokens, configurable speed and faults. The whole server is tested on it."""
