"""Build models and their optimizers on any number of ranks, step them, and export checkpoints.

    python learner.py runs/NAME/checkpoints/step_000123 --out DIR    # a checkpoint as a Hugging Face folder

Dimension key:  C completion tokens of one packed row.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import config
from config import Config, ConfigError, Loss, Model, Pack, Update, has_reference
from infra import dist
from infra.checkpoint import Optimizers, Role, original_model, require_whole
from infra.export import prompted_files
from infra.runfolder import COPIES
from infra.signals import exit_status
from infra.tokenizer import Tokenizer
from infra.weights import find_model
from loss import has_token_weights
from model import BACKENDS, WITH_ENTROPY, Decoder, empty_model
from pack import Minibatch, build_row, pack
from policy import Weights, weights_of
from records import Batch, Rolled, Row, frozen
from settings import kinds
from settings.loader import in_short
from settings.paths import user_path


class NotFinite(Exception):
    """A loss or a gradient that is no finite number, before the optimizer step that it would have spoilt."""

    def __init__(self, what: str, step: int, records: Batch | Rolled):
        super().__init__(f"the {what} in step {step} is not finite")
        self.step, self.records = step, records


@frozen
class Learner:
    """The model in training, how packed rows pass through it, and the settings that an update reads.

    An update calls `rows` for each mini-batch, and `outputs` for each pass of a row.
    """

    device: torch.device
    dtype: torch.dtype          # of the computation
    trained_dtype: torch.dtype  # of the trained weights: float32, or float64 if asked for
    backend: str                # a key of model.BACKENDS
    policy: Decoder             # sharded over the ranks, as the moments in the optimizer are
    reference: Callable | None  # the initial policy, if the loss needs it; frozen
    optimizers: Optimizers      # each of some weights; all are stepped together
    loss: Loss
    advantage: kinds.Advantage
    weighs_tokens: bool         # tokens are weighed by the policy before the update (loss.weigh)
    update: Update
    optim: kinds.Optim
    pack: Pack
    temperature: float          # rollout.temperature, which divides the logits in every pass
    max_new_tokens: int         # rollout.max_new_tokens, the divisor of loss.normalize=constant
    longest: int                # tokens of the longest prompt and completion together
    seed: int
    steps: int
    first: int = 0              # the policy learns from this step on
    # Of leaves; empty without them. The first two functions take the learner, a mini-batch and its prepared
    # rows, and return the rows with other values; the third takes the log-probs of a row, the prepared row
    # and its advantages, and returns other advantages.
    before_update: tuple[Callable, ...] = ()  # once on a rollout
    before_step: tuple[Callable, ...] = ()    # before each optimizer step
    in_pass: tuple[Callable, ...] = ()        # in each pass of a row
    roles: dict[str, Role] = field(default_factory=dict)  # other models in training, as checkpoints name them

    def log_probs(self, model: Callable, row: Row) -> Tensor:
        """Compute the log-probs of the row's completion tokens in nats, [C]."""
        return self.outputs(model, row)[0]

    def outputs(self, model: Callable, row: Row) -> tuple[Tensor, Tensor | None]:
        """Compute log-probs and, by a policy with loss.entropy, entropies before each token, in nats, [C]."""
        attend = BACKENDS[self.backend](row.segments)
        out = model(row.ids_T, row.position_T, attend, row.predict_C, row.target_C, self.temperature)
        return (out, None) if out.dim() == 1 else out.unbind(dim=1)

    def rows(self, minibatch: Minibatch) -> list[Row]:
        """Pack a mini-batch, and build this rank's rows of it on the device."""
        hands = pack(minibatch, self.pack, dist.world_size(), self.policy.quadratic)
        return [build_row(minibatch, plan).to(self.device, self.trained_dtype) for plan in hands[dist.rank()]]


def out_of_memory(rows: list[Row], least: int, error: torch.OutOfMemoryError) -> ConfigError:
    """Make the error for running out of memory in passes of these rows, with the remedy.

    A row must hold one whole sequence, so no smaller pack.capacity than `least` is named, Learner.longest.
    """
    longest = max(len(row.ids_T) for row in rows)
    smaller = max(longest // 2, least)
    shorter = f"--set pack.capacity={smaller}, or " if smaller < longest else ""
    return ConfigError(
        f"out of memory in an update with rows of up to {longest} tokens on rank {dist.rank()}: go on "
        f"with --resume auto and {shorter}--set model.checkpoint_blocks=all or "
        f"rollout.sleep=always (vLLM) or optim.offload=true (CUDA), or on more ranks ({in_short(error)})")


def build_learner(cfg: Config, source: Path, device: torch.device, weights: Weights) -> Learner:
    """Load the policy, and a reference if the loss needs one. Raises ConfigError."""
    dtype = getattr(torch, cfg.model.dtype)
    policy = load_sharded(cfg, source, device, dtype, weights)
    if cfg.loss.entropy:
        policy.elementwise = WITH_ENTROPY  # which model.compile leaves as it is
    reference = None
    if has_reference(cfg):
        reference = (weights.initial(policy) or
                     load_sharded(cfg, source, device, dtype, weights, frozen=True))
    return Learner(
        device,
        dtype,
        dist.dtype_of_trained(policy),
        cfg.model.attention,
        policy,
        reference,
        optimizers=make_optimizers(policy, cfg.optim),
        loss=cfg.loss,
        advantage=cfg.advantage,
        weighs_tokens=has_token_weights(cfg.loss),
        update=cfg.update,
        optim=cfg.optim,
        pack=cfg.pack,
        temperature=cfg.rollout.temperature,
        max_new_tokens=cfg.rollout.max_new_tokens,
        longest=cfg.longest,
        seed=cfg.seed,
        steps=cfg.steps)


def load_sharded(cfg: Config, source: Path, device: torch.device, dtype: torch.dtype, weights: Weights,
                 frozen: bool = False) -> Decoder:
    """Load a model spread over the ranks, in at least float32 unless frozen. No rank ever holds the whole."""
    model = empty_model(source, dtype if frozen else torch.promote_types(dtype, torch.float32))
    weights.adapt(model, dtype)
    shard_empty(model, model, cfg.model, cfg.optim.offload, device, dtype)
    weights.fill(model, source)
    return model.requires_grad_(False) if frozen else model


def shard_empty(model: nn.Module, backbone: Decoder, settings: Model, offload: bool, device: torch.device,
                dtype: torch.dtype) -> None:
    """Shard an empty model over the ranks and give it memory."""
    # A rank alone without a cast has nothing to gather; FSDP's hooks alone are a tenth of a small update.
    if dist.world_size() > 1 or offload or dtype != dist.dtype_of_trained(model):
        dist.shard(model, backbone.layers, device, dtype, offload)
    model.to_empty(device="cpu" if offload else device)
    backbone.checkpoint_blocks, backbone.logp_chunk = settings.checkpoint_blocks, settings.logp_chunk
    if settings.compile:
        backbone.compile_passes()


def make_optimizers(model: nn.Module, optim: kinds.Optim) -> Optimizers:
    """Make the optimizers of a model's trained weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return OPTIMIZERS[optim.kind](model, trained, optim)


def adamw(model: nn.Module, trained: list[nn.Parameter], optim: kinds.AdamW) -> tuple[torch.optim.AdamW]:
    """Make AdamW with its moments allocated now, so a checkpoint can be loaded before the first step."""
    optimizer = torch.optim.AdamW(
        trained, optim.lr, (optim.beta1, optim.beta2), weight_decay=optim.weight_decay, fused=True)
    for p in trained:
        optimizer.state[p] = {
            "step": torch.zeros((), device=dist.local_shard(p).device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return (optimizer,)


# optim.kind -> function of a model, its trained weights and that section of the config
OPTIMIZERS = {"adamw": adamw}


def learning_rate(step: int, optim: kinds.Optim, steps: int) -> float:
    """Compute a step's rate, a pure function: linear warm-up, then constant or a cosine to 0 at `steps`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    return optim.lr * (1 + math.cos(math.pi * done)) / 2


def optimizer_step(
    model: nn.Module,
    optimizers: Optimizers,
    rate: float,
    clip_norm: float,
    loss: Tensor | float,
    not_finite: Callable[[str], NotFinite]
) -> float:
    """Take one step of all optimizers on the accumulated gradient; returns its norm before clipping.

    Every group of parameters steps at `rate`, times its factor "lr_scale", if an optimizer gives it one.

    Collective. Raises NotFinite on every rank before a step that would spoil the model. Without any gradient
    nothing changes: neither momentum nor weight decay is applied then.
    """
    norm = dist.gather_full(nn.utils.clip_grad_norm_(model.parameters(), clip_norm)).item()
    finite = math.isfinite(float(loss))
    if dist.max_over_ranks(not finite) or not math.isfinite(norm):
        raise not_finite("gradient" if finite else "loss")
    if norm > 0:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)
            optimizer.step()
    model.zero_grad()
    return norm


def main() -> int:
    parser = argparse.ArgumentParser(description="A checkpoint as a Hugging Face folder for eval.py or vLLM.")
    parser.add_argument("checkpoint", type=user_path, help="runs/NAME/checkpoints/step_000123")
    parser.add_argument("--out", type=user_path, required=True, help="the folder to write")
    args = parser.parse_args()
    return exit_status(partial(export_checkpoint, args.checkpoint, args.out))


def export_checkpoint(step: Path, out: Path) -> None:
    """Write the policy of a checkpoint as new Hugging Face folders. Raises ConfigError."""
    for folder in (out, out.absolute().with_name(f"{out.name}_adapter")):  # an adapter's is beside it
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--out {folder} is a file, or a folder with something in it; name a new one")
    require_whole(step)
    source = find_model(original_model(step))
    dist.init("cpu")
    weights = weights_of(step)
    model = weights.policy(step, source, torch.float32)
    weights.export(model, source, out, texts_of_run(step.absolute().parents[1], source))


def texts_of_run(run: Path, source: Path) -> dict[str, str]:
    """Write what the run's own export has in place of the source's files; nothing for a checkpoint alone."""
    if not (run / "config.yaml").is_file():
        return {}
    cfg = config.load(run / "config.yaml")
    template = run / COPIES["data.chat_template"]
    data = replace(cfg.data, chat_template=str(template)) if template.is_file() else cfg.data
    return prompted_files(Tokenizer(source, data, cfg.rollout.stop or ()), data.system_prompt)


if __name__ == "__main__":
    sys.exit(main())
