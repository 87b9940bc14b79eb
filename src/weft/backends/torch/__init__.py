"""The torch backend: Hugging Face checkpoints, native decoders for the common families, an adapter for the others."""
