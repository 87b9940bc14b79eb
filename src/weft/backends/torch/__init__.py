"""The torch backend: Hugging Face checkpoints, native decoders for the common families, an adapter for the others.

Importing this package shortens how long PyTorch's OpenMP threads spin for each other, unless the user has chosen
already. A decode step passes some five hundred short parallel sections; with libgomp's default of about a millisecond
a thread that lost its core to another process holds up all others at each of them, and a step on two cores, one of
them shared, was measured to take five to ten times as long. It must happen before torch is first imported.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
