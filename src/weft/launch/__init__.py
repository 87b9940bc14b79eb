"""Floor 7: the processes of a worker, and the supervisor that starts, watches and ends them."""
