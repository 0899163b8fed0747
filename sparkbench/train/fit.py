"""The training loop that targets and drafters share: AdamW steps, checkpoints, exact resumption.

A step's loss is a function of the step number and the weights alone: batches and random draws come from
generators seeded by the step. So a run that was interrupted and continued ends in the same state as one that
was not.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sparkbench.errors import RunError
from sparkbench.train.recipe import Optimisation
from sparkbench.train.storage import load_tensors, save_tensors

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Fit:
    """What a training was: mean loss of each tenth of each of its phases, wall and CPU seconds over all sittings."""

    losses: tuple[float, ...]
    wall_s: float
    cpu_s: float


def fit(
    weights: Mapping[str, nn.Parameter],
    loss_of: Callable[[int], Tensor],
    optimisation: Optimisation,
    checkpoint: Path,
    identity: str,
    progress: Progress,
    stop_after: int | None = None,
    log_every: int = 50,
) -> Fit:
    """Train `weights` in place for `optimisation.steps` steps and return the curve.

    loss_of:    step number -> loss, with its graph; or without one, when the gradients are in the weights already.
    checkpoint: state file; when it exists, training continues from it.
    identity:   fingerprint of what is trained. RunError: the checkpoint has another one, or the loss is not
    finite. stop_after: stop early at this step, with a checkpoint, as an interruption would.
    log_every:  steps between lines of progress, which give the mean loss since the last one.
    """
    optimizer = _optimizer(weights, optimisation)
    losses: list[float] = []
    wall_before = cpu_before = 0.0
    if checkpoint.exists():
        losses, wall_before, cpu_before = _restore(checkpoint, identity, weights, optimizer)
        progress(f"{checkpoint.stem}: continues at step {len(losses)}")
    wall_start, cpu_start = time.perf_counter(), time.process_time()

    def spent() -> tuple[float, float]:
        return wall_before + time.perf_counter() - wall_start, cpu_before + time.process_time() - cpu_start

    end = optimisation.steps if stop_after is None else min(stop_after, optimisation.steps)
    for step in range(len(losses), end):
        for group in optimizer.param_groups:
            group["lr"] = optimisation.lr_at(step)
        loss = loss_of(step)
        if loss.requires_grad:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), optimisation.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if not losses[-1] < float("inf"):
            raise RunError(f"{checkpoint.stem}: the loss of step {step} is {losses[-1]}")
        done = step + 1
        if done % log_every == 0 or done == end:
            wall, cpu = spent()
            mean = sum(losses[-log_every:]) / len(losses[-log_every:])
            place = f"{checkpoint.stem}: step {done}/{optimisation.steps}"
            progress(f"{place} loss {mean:.4f} wall {wall:.0f} s cpu {cpu:.0f} s")
        if done % optimisation.save_every == 0 or done == end:
            _save(checkpoint, identity, weights, optimizer, losses, *spent())
    wall, cpu = spent()
    part = max(1, len(losses) // 10)
    curve = tuple(sum(losses[i : i + part]) / len(losses[i : i + part]) for i in range(0, len(losses), part))
    return Fit(curve, wall, cpu)


def compiled(plain: Callable[..., Tensor], example: tuple[Tensor, ...], progress: Progress) -> Callable[..., Tensor]:
    """`plain` compiled for arguments of the example's shapes, or itself where the machine cannot compile."""
    fast = torch.compile(plain, dynamic=False)
    try:
        fast(*example)
    except RuntimeError as error:  # no C++ compiler, or no headers of Python
        progress(f"cannot compile here, so training is slower: {str(error).splitlines()[0]}")
        return plain
    return fast


@torch.no_grad()
def restore_weights(path: Path, weights: Mapping[str, nn.Parameter]) -> None:
    """Copy the weights that a checkpoint of `fit` holds into `weights`."""
    tensors, _ = load_tensors(path)
    for name, weight in weights.items():
        weight.copy_(tensors[f"weight/{name}"])


def step_generator(seed: int, *numbers: int) -> torch.Generator:
    """A generator of its own for each tuple of numbers."""
    mixed = seed
    for number in numbers:
        mixed = (mixed * 0x5851F42D4C957F2D + number + 0x14057B7EF767814F) % (1 << 63)
    return torch.Generator().manual_seed(mixed)


def epoch_batch(count: int, batch: int, step: int, seed: int) -> Tensor:
    """Indices [batch] of step `step`: an endless walk over 0..count-1, shuffled anew each time round."""
    first = step * batch
    indices = []
    for epoch in range(first // count, (first + batch - 1) // count + 1):
        order = torch.randperm(count, generator=step_generator(seed, epoch))
        low, high = max(first - epoch * count, 0), min(first + batch - epoch * count, count)
        indices.append(order[low:high])
    return torch.cat(indices)


def _optimizer(weights: Mapping[str, nn.Parameter], optimisation: Optimisation) -> torch.optim.AdamW:
    """Weight decay for matrices only, as is usual."""
    matrices = [weight for weight in weights.values() if weight.dim() > 1]
    others = [weight for weight in weights.values() if weight.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": optimisation.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optimisation.lr, betas=optimisation.betas, fused=True)


def _save(
    path: Path,
    identity: str,
    weights: Mapping[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    losses: list[float],
    wall_s: float,
    cpu_s: float,
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        state = optimizer.state[weight]
        tensors |= {
            f"weight/{name}": weight,
            f"mean/{name}": state["exp_avg"],
            f"square/{name}": state["exp_avg_sq"],
        }
    save_tensors(path, tensors, {"identity": identity, "losses": losses, "wall_s": wall_s, "cpu_s": cpu_s})


@torch.no_grad()
def _restore(
    path: Path, identity: str, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW
) -> tuple[list[float], float, float]:
    tensors, facts = load_tensors(path)
    if facts["identity"] != identity:
        raise RunError(f"{path} belongs to another recipe; use another work folder or delete it")
    for name, weight in weights.items():
        weight.copy_(tensors[f"weight/{name}"])
        optimizer.state[weight] = {
            "step": torch.tensor(float(len(facts["losses"])), device=weight.device),
            "exp_avg": tensors[f"mean/{name}"].to(weight.device),
            "exp_avg_sq": tensors[f"square/{name}"].to(weight.device),
        }
    return facts["losses"], facts["wall_s"], facts["cpu_s"]
