"""The same training step for every model in torch: cross entropy and AdamW."""

import torch
from torch.nn import functional


class TorchTraining:
    """Trains `self.model` through `self.batch_logits`."""

    def start_training(self):
        """Make the optimizer; its state is allocated by the first step."""
        self.model.train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        return sum(p.numel() for p in trained)

    def train_step(self, rows):
        """Forward, backward and update; return the loss."""
        logits = self.batch_logits(rows)[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, torch.tensor(rows)[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()
