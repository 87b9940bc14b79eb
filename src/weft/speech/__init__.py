"""Floor 6: text to audio behind one protocol. `registry.create_speaker` is all that others need."""
