"""One step on the device: input batch, attention, CUDA graphs, sampling, memory plan."""
