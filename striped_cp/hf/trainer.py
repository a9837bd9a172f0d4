"""Trainer and SFTTrainer on the ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from .batch import RingCollator

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class RingTrainerMixin(_Base):
    """Serves every rank of a ring the same examples: `class T(RingTrainerMixin, SFTTrainer)`.

    The collator must be a `RingCollator`, and the processes of a ring must be neighbours. The rest
    is the trainer's own: it counts the targets of all ranks and averages the gradients of their
    shares, which is what exactness needs.

    Raises:
        ValueError: settings under which the trainer or accelerate would compute something else.
    """

    def __init__(self, *args: Any, data_collator: RingCollator, **kwargs: Any) -> None:
        if not isinstance(data_collator, RingCollator):
            raise ValueError(f"data_collator = {data_collator!r:.60}: must be a RingCollator")
        super().__init__(*args, **kwargs)
        self.data_collator = data_collator  # now: SFTTrainer takes none when it packs
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "parallelism_config: cp_size and sp_size must be 1: accelerate (1.10 and later, "
                "seen in 1.15) would shard the batch once more and attend by another kernel"
            )
        for name, needed in (
            ("average_tokens_across_devices", True),
            ("label_smoothing_factor", 0),
        ):
            if getattr(self.args, name) != needed:
                raise ValueError(f"{name} = {getattr(self.args, name)}: must be {needed}")
        ranks = data_collator.mesh.mesh.flatten().tolist()
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] % len(ranks):
            raise ValueError(f"the ring's ranks {ranks} must be neighbours: make it the last axis")
        self._ring_size = len(ranks)

    def get_train_dataloader(self) -> DataLoader:
        return self._per_ring(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return self._per_ring(super().get_eval_dataloader(*args, **kwargs))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if num_items_in_batch is None:  # evaluation in TRL: by default a mean of ranks' own means
            rings = self.accelerator.num_processes // self._ring_size
            num_items_in_batch = inputs["num_items_in_batch"] * rings
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _per_ring(self, loader: DataLoader) -> DataLoader:
        """Its batches are dealt out to rings, no longer to processes."""
        if self.accelerator.num_processes == 1 or getattr(loader, "dealt_to_rings", False):
            return loader
        # accelerate's BatchSamplerShard or IterableDatasetShard.
        shard: Any = next(
            (x for x in (loader.batch_sampler, loader.dataset) if hasattr(x, "num_processes")), None
        )
        if shard is None:
            raise ValueError(
                f"{type(loader).__name__} does not deal out its own batches to the ranks: "
                "leave dispatch_batches off, and datasets.IterableDataset unsharded"
            )
        shard.num_processes //= self._ring_size
        shard.process_index //= self._ring_size
        loader.dealt_to_rings = True
        return loader
