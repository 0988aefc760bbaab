"""NeuCLIP and the family of contrastive losses around it."""

import os

# Two spinning OpenMP threads on one busy core are a hundred times slower than one; the variable is
# read when torch loads its OpenMP library, so it stands before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
