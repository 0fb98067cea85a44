import torch

torch.set_num_threads(1)  # matrices this small only wait for a second thread (three times as long on a busy machine)
