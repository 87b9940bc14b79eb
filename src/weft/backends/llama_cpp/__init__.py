"""The llama.cpp backend: GGUF files, their header, their vocabulary, and the model itself.

Nothing here loads the library `llama_cpp` on import; `gguf` never does.
"""
