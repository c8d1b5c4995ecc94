"""What all tests share: one torch thread in each test process, so that they do not fight for the cores."""

import torch

torch.set_num_threads(1)
