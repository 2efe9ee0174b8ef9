"""The shard of a target that one rank computes: some of its layers (pipeline), and a slice of each (tensor)."""

from dataclasses import dataclass, field

from specinfer.parallel.group import Alone, Group


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A rank's place among the ranks of a target.

    The engine is on rank 0, which is in the *last* stage, so that logits are where they are verified: ranks count
    through the tensor group first, then through the stages from the last to the first.

    Attributes:
        tensor: Ranks that have the same layers, each a slice of them.
        stage: Number of the stage; 0 embeds tokens, the last one has the head.
        num_stages: Number of stages.
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
        """True if logits are computed here: on one rank of the last stage."""
        return self.is_last and self.tensor.rank == 0

    @property
    def is_whole(self) -> bool:
        """True if the target is not split."""
        return self.num_stages == self.tensor.size == 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage. Earlier stages get the remainder, because the last one has the head."""
        each, more = divmod(num_layers, self.num_stages)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))
