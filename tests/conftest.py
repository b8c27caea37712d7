"""What every test needs before torch is loaded."""

import os

# Kernels on tiny graphs are many short parallel regions. On a busy machine a thread that spins while it waits takes the
# core from the one it waits for; asleep, it makes the tests several times faster. Results do not change.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
