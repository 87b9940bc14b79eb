"""Images and sound on their way into a prompt: well-formed parts, decoding within limits, hashes and cache keys."""
