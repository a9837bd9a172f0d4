"""Cross-entropy that never holds the logits of the whole local sequence.

The logits of 131,072 tokens over Llama-3's 128,256 words take 31 GiB in bfloat16 and, with the
float32 copy and the gradients of the plain path, 188 GiB. With `memory.loss_chunk_tokens` the
output projection takes the labels and returns their loss: for one chunk of tokens after the other
it makes the logits, their loss and at once their gradient, from which it adds up the gradients of
the hidden states and of the weight. Nothing is computed twice.

`torch.nn.functional.linear_cross_entropy` (torch 2.13) chunks likewise, but returns the loss in
the dtype of the hidden states (a sum of 131,072 losses in bfloat16 keeps 8 bits) and knows no
sharded vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from recipes.titan import IGNORE_INDEX, JobConfig, LossFunction, logger

_collected: list[torch.Tensor] | None = None


@contextlib.contextmanager
def collect_token_losses() -> Iterator[list[torch.Tensor]]:
    """Gather the losses of single tokens from every forward pass in the scope.

    Yields:
        A list that gets float32 (b, S/P) without gradient from each forward pass (in a pipeline,
        from each microbatch in order, on the last stage), 0 where there is nothing to predict.
    """
    global _collected
    before, _collected = _collected, []
    try:
        yield _collected
    finally:
        _collected = before


def _collect(losses: torch.Tensor, like: torch.Tensor) -> None:
    if _collected is not None:
        losses = losses.detach()
        plain = losses.full_tensor() if isinstance(losses, DTensor) else losses
        _collected.append(plain.view_as(like))


def build_loss(job_config: JobConfig, **kwargs) -> LossFunction:
    """Loss for torchtitan's trainer: a sum over the tokens whose label is not -100."""
    chunk_tokens = job_config.memory.loss_chunk_tokens
    if chunk_tokens:
        logger.info(f"Loss: computed by the model in chunks of {chunk_tokens} tokens")
        return loss_of_model
    logger.info("Loss: logits of the whole local sequence at once")
    settings = job_config.compile
    compiled = settings.enable and "loss" in settings.components
    losses_of_logits = (
        torch.compile(_losses_of_logits, backend=settings.backend)
        if compiled
        else _losses_of_logits
    )

    def loss_of_logits(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = losses_of_logits(pred, labels)
        _collect(losses, labels)
        return losses.sum()

    return loss_of_logits


def _losses_of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """float32 (B * S/P,) losses of logits (B, S/P, V)."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )


def loss_of_model(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The model took the labels, so what it returned is the loss."""
    return pred


class LossHead(nn.Linear):
    """Output projection: logits of hidden states, or with labels the sum of their losses."""

    def __init__(self, dim: int, vocab_size: int, chunk_tokens: int):
        super().__init__(dim, vocab_size, bias=False)
        self.chunk_tokens = chunk_tokens
        self.chunk_loss: Callable = _chunk_loss

    def compile_loss(self, backend: str) -> None:
        """Fuse what is done to a chunk's logits (`compile.components` with "loss")."""
        self.chunk_loss = torch.compile(_chunk_loss, backend=backend)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            hidden: (B, S/P, dim).
            labels: int64 (B, S/P), IGNORE_INDEX where there is nothing to predict.

        Returns:
            (B, S/P, V) logits without labels, else the float32 sum of the losses.
        """
        if labels is None:
            return super().forward(hidden)
        weight, group = self.weight, None
        if isinstance(weight, DTensor):
            # Each rank of the tensor-parallel group holds a slice of the vocabulary and gets every
            # token: what it finds for a hidden state's gradient is one part of a sum.
            assert isinstance(hidden, DTensor)
            group = weight.device_mesh.get_group()
            hidden = hidden.to_local(grad_placements=[Partial()])
            weight = weight.to_local(grad_placements=[Shard(0)])
        loss, losses = ChunkedCrossEntropy.apply(
            hidden.flatten(0, 1),
            weight,
            labels.flatten(),
            self.chunk_tokens,
            group,
            self.chunk_loss,
            torch.is_grad_enabled(),
        )
        _collect(losses, labels)
        return loss


class LossHeadParallel(ColwiseParallel):
    """Shards a LossHead over the vocabulary; a loss, unlike logits, is no DTensor already."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        if not isinstance(outputs, DTensor):
            return outputs
        return ColwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of hidden @ weight.T, with gradients made on the way forward."""

    @staticmethod
    def forward(
        ctx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        chunk_loss: Callable,
        with_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden: (N, dim), every token on every rank of the group.
            weight: (V/T, dim), this rank's slice of the vocabulary.
            labels: int64 (N,), of the whole vocabulary.
            group: the T tensor-parallel ranks, or None.
            chunk_loss: `_chunk_loss` or a compiled version of it.
            with_gradients: False for validation.

        Returns:
            float32 () and, without gradient, the losses of the tokens it is the sum of, float32
            (N,); equal on all ranks of the group.
        """
        first_word = weight.shape[0] * dist.get_rank(group) if group is not None else 0
        losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        if with_gradients:
            hidden_grad = torch.empty_like(hidden)
            # float32: in bfloat16 every chunk's addition would round what came before it.
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = F.linear(hidden[chunk], weight)
            losses[chunk], logits_grad = chunk_loss(
                logits, labels[chunk] - first_word, labels[chunk], group
            )
            if with_gradients:
                logits_grad = logits_grad.to(logits.dtype)
                del logits
                hidden_grad[chunk] = logits_grad @ weight
                weight_grad += logits_grad.T @ hidden[chunk]
        if with_gradients:
            ctx.save_for_backward(hidden_grad, weight_grad)
            ctx.weight_dtype = weight.dtype
            ctx.scale = None
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor, _losses_grad: torch.Tensor):
        hidden_grad, weight_grad = ctx.saved_tensors
        if ctx.scale is None:
            # In place: the two are as large as the hidden states and the weight. `data` hides it
            # from autograd, which would take the second pass of a zero-bubble schedule for a
            # mistake: one is for the inputs and one for the weights, from the same gradient.
            hidden_grad.data.mul_(grad)
            weight_grad.data.mul_(grad)
            ctx.scale = grad
        elif not torch.equal(ctx.scale, grad):
            raise RuntimeError("the loss was differentiated before, with another gradient")
        return hidden_grad, weight_grad.to(ctx.weight_dtype), None, None, None, None, None


def _chunk_loss(
    logits: torch.Tensor,
    local_labels: torch.Tensor,
    labels: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of one chunk and their gradient with respect to the logits.

    Args:
        logits: (n, V/T), any float dtype.
        local_labels: int64 (n,), counted from this rank's first word; may lie outside.
        labels: int64 (n,), IGNORE_INDEX where there is no loss.
        group: the T ranks that share the vocabulary, or None.

    Returns:
        float32 (n,) losses, float32 (n, V/T).
    """
    # In place from here on: a chunk of 2048 tokens has 1 GiB of float32 scores.
    scores = logits.float()
    valid = labels != IGNORE_INDEX
    mine = valid & (local_labels >= 0) & (local_labels < scores.shape[-1])
    index = torch.where(mine, local_labels, 0)[:, None]

    largest = scores.amax(dim=-1, keepdim=True)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scores.sub_(largest)
    of_label = torch.where(mine, scores.gather(-1, index)[:, 0], 0.0)
    scores.exp_()
    sums = torch.stack([scores.sum(dim=-1), of_label])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, of_label = sums
    losses = torch.where(valid, total.log() - of_label, 0.0)

    scores.mul_((valid / total)[:, None])
    scores.scatter_add_(-1, index, -mine[:, None].to(scores.dtype))
    return losses, scores
