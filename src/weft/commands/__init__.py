"""Floor 7: what the `weft` commands do, one module each; `cli.py` only parses."""
