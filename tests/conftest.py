"""One thread a test process, so that results do not depend on how many run at once."""

import torch

torch.set_num_threads(1)
