"""Python imports this at the start of each process that has this folder on PYTHONPATH."""

import fake_cuda

fake_cuda.enable()
