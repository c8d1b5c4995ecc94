"""What all tests share: one torch thread in each test process, so that processes side by side do not fight for cores."""

import torch

torch.set_num_threads(1)
