"""Recording and substituting named intermediate tensors. Report §2.3.1.

One mechanism for traces, for feeding a layer the inputs of another engine, and for the record and
replay of discrete choices (expert ids, selected entries) that reinforcement learning needs.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

CHOICES = ("expert_ids", "topk_indices", "candidate_mask")


class Probe:
    """Keeps the tensors that ``wants`` accepts, and goes on with ``feed`` where it holds a name.

    ``values`` are what the forward itself computed, also where something else is fed after it.
    Names are ``layers.{i}.{what}`` or plain words such as ``embed``; docs/numerics.md lists them.
    """

    def __init__(
        self,
        wants: Callable[[str], bool] = lambda _: True,
        feed: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.values: dict[str, Tensor] = {}
        self.wants = wants
        self._feed = feed or {}

    @classmethod
    def recording_choices(cls) -> "Probe":
        """Keep the discrete choices of every layer, and nothing else."""
        return cls(lambda name: name.rpartition(".")[2] in CHOICES)

    @classmethod
    def replaying(cls, choices: Mapping[str, Tensor]) -> "Probe":
        """Make the choices that another run recorded."""
        return cls(lambda _: False, choices)

    def wants_or_feeds(self, name: str) -> bool:
        """Whether a tensor that the forward could do without is needed here."""
        return name in self._feed or self.wants(name)

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Return the value to go on with: ``value``, or what is fed under ``name``."""
        if self.wants(name):
            self.values[name] = value.detach()
        if name in self._feed:
            return self._feed[name].to(value.device)
        return value
