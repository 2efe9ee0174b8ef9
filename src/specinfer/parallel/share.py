"""What one rank holds of a target: some of its layers (pipeline), and of each of them a part (tensor)."""

from dataclasses import dataclass, field

from specinfer.parallel.group import Alone, Group


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's place among those that hold a target.

    The engine is on rank 0, which is of the *last* stage, so that logits are where they are verified: ranks count
    through the tensor group first, then through the stages from the last to the first.

    Attributes:
        tensor: The ranks that hold the same layers, each a part of them.
        stage: 0 embeds tokens, the last one has the head.
    """

    tensor: Group = field(default_factory=Alone)
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def has_head(self) -> bool:
        """Whether logits are computed here: by one rank of the last stage."""
        return self.is_last and self.tensor.rank == 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing is split."""
        return self.num_stages == self.tensor.size == 1

    def layers(self, num_layers: int) -> range:
        """Those of this stage; earlier stages have one more if they do not divide, since the last has the head."""
        each, more = divmod(num_layers, self.num_stages)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))
