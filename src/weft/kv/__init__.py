"""Floor 2: who owns which KV slot. numpy only."""
