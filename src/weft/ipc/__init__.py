"""Floor 2: messages between the API, text and engine processes, and the sockets that carry them."""
