"""The algorithms shipped: one small file each, named in `agentrl.train.options`."""
