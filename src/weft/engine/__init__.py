"""Floor 5: the loop that joins scheduler and backend, the processes around it, and `LLM`, the offline API."""
