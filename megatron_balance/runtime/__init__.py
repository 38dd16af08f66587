"""Moves samples between ranks by a given schedule, over torch.distributed; process groups are arguments."""
