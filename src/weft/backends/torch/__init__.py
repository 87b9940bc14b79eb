"""The torch backend: Hugging Face checkpoints, native decoders for the common families, an adapter for the others.

Importing this package shortens how long PyTorch's OpenMP threads spin for each other, unless the user has chosen
already. A decode step passes hundreds of short parallel sections, and with libgomp's default a thread that has lost its
processor to another process holds up all others at each of them for a whole time slice. The value is measured (see
docs/benchmarks.md): shorter spins lose more than half on a quiet machine, longer ones win little there. It must happen
before torch is first imported.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
