"""Every op in plain PyTorch: slow, obvious, the oracle."""

import os

# Between two parallel regions OpenMP's threads spin, which starves whoever shares the cores: the server, its clients,
# another engine. Measured with two cores and a load of 7: ten tokens took 34 s spinning and 5 s sleeping. The library
# reads this once, when PyTorch loads it, so it is set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
