"""The target: a transformers causal language model, loaded safely and checked before use.

Supported are decoder-only rotary models whose layers all use full or sliding-window attention and take 4D masks under
SDPA; tested are Qwen3, Llama, Mistral and Gemma 3. At load a small tree forward is compared with plain forwards over
each path, and a model that fails is refused by name. Only safetensors are read, and no remote code runs.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkbench.decoding import attention
from sparkbench.decoding.layout import store_by_columns
from sparkbench.decoding.masks import FULL, SLIDING
from sparkbench.decoding.tree import DraftTree
from sparkbench.decoding.verifier import Verifier
from sparkbench.errors import RunError, UsageError, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target.

    name, revision: where it comes from (folder or hub id; the commit the hub resolved, None for a folder).
    windows:    sliding window by layer type in use, None for full attention; `layer_windows`: by layer.
    by_type:    the model takes a dict of masks by layer type instead of one mask.
    stop_ids:   token ids that end a generation: those of the generation config, the config and the tokenizer.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    windows: dict[str, int | None]
    layer_windows: tuple[int | None, ...]
    by_type: bool
    cache_argument: str
    stop_ids: frozenset[int]

    @classmethod
    def load(
        cls,
        source: str,
        *,
        name: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        check: bool = True,
    ) -> "Target":
        """Load from a folder or a hub id; `name` is what messages and results call it (default: the source).

        dtype: float32, bfloat16 or auto (bfloat16 on a GPU, float32 on a CPU).  device: auto, cpu, cuda, cuda:1 ...
        UsageError: unknown dtype or device, missing or broken files, an unsupported architecture.
        RunError: the hub cannot be reached, or memory runs out.
        """
        place = resolve_device(device)
        number_type = resolve_dtype(dtype, place)
        model, tokenizer = _load_files(source, revision, number_type, place)
        target = cls.wrap(model, tokenizer, name or source)
        if check:
            target.check_trees()
        return target

    @classmethod
    def wrap(cls, model: Any, tokenizer: Any = None, name: str = "unnamed") -> "Target":
        """Make a target of a model in memory. UsageError: an architecture that is not supported."""
        config = model.config
        decoder = model.base_model
        if not hasattr(decoder, "layers") or not hasattr(decoder, "norm") or model.get_output_embeddings() is None:
            raise UsageError(f"target {name}: {type(model).__name__} is not a plain decoder-only language model")
        model.eval().requires_grad_(False)
        kinds = _layer_kinds(config)
        unsupported = sorted(set(kinds) - {FULL, SLIDING})
        if unsupported:
            raise UsageError(
                f"target {name}: {type(model).__name__} has layers of type {', '.join(unsupported)}; "
                f"supported are {FULL} and {SLIDING}"
            )
        moving = sorted(_rope_types(config) & {"dynamic", "longrope"})
        if moving:
            raise UsageError(
                f"target {name}: RoPE of type {moving[0]} changes with the sequence's length, so that a draft tree and "
                "its paths differ; it is not supported"
            )
        windows = {kind: config.sliding_window if kind == SLIDING else None for kind in dict.fromkeys(kinds)}
        parameters = inspect.signature(decoder.forward).parameters
        return cls(
            model=model,
            tokenizer=tokenizer,
            name=name,
            revision=getattr(config, "_commit_hash", None),
            windows=windows,
            layer_windows=tuple(windows[kind] for kind in kinds),
            by_type=_takes_masks_by_type(decoder, windows),
            cache_argument="cache" if "cache" in parameters else "past_key_values",
            stop_ids=_stop_ids(model, tokenizer),
        )

    @cached_property
    def decoder(self) -> Any:
        return self.model.base_model

    @cached_property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @cached_property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @cached_property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @cached_property
    def num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @cached_property
    def kv_heads(self) -> int:
        return int(self.model.config.num_key_value_heads)

    @cached_property
    def head_dim(self) -> int:
        config = self.model.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @cached_property
    def max_context(self) -> int:
        """Most positions a sequence may have, prompt and output together."""
        return int(self.model.config.max_position_embeddings)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids [...], as the first layer sees them."""
        return self.model.get_input_embeddings()(ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states [..., H]."""
        logits = self.model.get_output_embeddings()(hidden)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else (logits / cap).tanh() * cap

    def run(self, ids: Tensor, positions: Tensor, masks: dict[str, Tensor | None], cache: Any) -> Tensor:
        """The decoder's final hidden states [B, N, H] for ids and positions [B, N]; `cache` takes the new entries."""
        mask = masks if self.by_type else next(iter(masks.values()))
        output = self.decoder(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{self.cache_argument: cache}
        )
        return output.last_hidden_state

    def session(self, batch: int, capacity: int, feature_layers: Sequence[int] = ()) -> Verifier:
        """A verifier for one batch of `batch` rows."""
        return Verifier(self, batch, capacity, feature_layers)

    @torch.inference_mode()
    def check_trees(self) -> None:
        """Compare a small branching tree behind a prefix with plain forwards over each path. UsageError if they differ.

        The prefix is longer than a sliding window of up to 64, so that small windows are exercised too.
        """
        window = min((w for w in self.windows.values() if w is not None), default=0)
        length = window + 3 if window <= 64 else 9
        draws = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (1, length + 7), generator=draws).to(self.device)
        parents = torch.tensor([[-1, 0, 1, 0, 3, 2, 3]], device=self.device)
        depths = torch.tensor([[0, 1, 2, 1, 2, 3, 2]], device=self.device)
        tree = DraftTree(ids[:, length:], parents, depths, torch.ones_like(parents, dtype=torch.bool), 3)
        verifier = self.session(1, length + 7)
        verifier.prefill([ids[0, :length].tolist()])
        logits = verifier.verify(verifier.pack(tree)).logits[0].float()
        worst = 0.0
        for node in range(tree.width):
            path = tree.visibility[0, node].nonzero()[:, 0]
            plain = self.model(torch.cat([ids[:, :length], tree.tokens[:, path]], 1), use_cache=False).logits[0, -1]
            worst = max(worst, (plain.float() - logits[node]).abs().max().item())
        scale = max(1.0, logits.std().item())
        allowed = scale * (1e-3 if self.dtype == torch.float32 else 0.25)
        if not worst <= allowed:
            raise UsageError(
                f"target {self.name}: {type(self.model).__name__} computes a draft tree differently from its paths "
                f"(logits differ by {worst:.3g}, allowed {allowed:.3g}), so it cannot verify trees"
            )


def resolve_device(device: str) -> torch.device:
    """auto, cpu, cuda or cuda:N -> a device that exists. UsageError otherwise."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not index.isdigit()):
        raise UsageError(f"unknown device {device!r}; allowed: auto, cpu, cuda, cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {device} does not exist here: {torch.cuda.device_count()} CUDA devices found")
    return torch.device(device)


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16: the name without its module."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto, float32 or bfloat16 -> a torch dtype. UsageError otherwise."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _load_files(source: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(source)
    local = folder.is_dir()
    if local and not (folder / "config.json").is_file():
        raise UsageError(f"target {source}: the folder has no config.json")
    options = {"revision": revision, "trust_remote_code": False}
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, report = load(
            source,
            dtype=dtype,
            attn_implementation=attention.implementation(device),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **options,
        )
        model = model.to(device)
        store_by_columns(model)
        without = local and not any((folder / f"{name}.json").is_file() for name in ("tokenizer", "tokenizer_config"))
        tokenizer = None if without else AutoTokenizer.from_pretrained(source, **options)
    except SafetensorError as error:
        raise UsageError(f"target {source}: broken weight file: {error}") from error
    except torch.OutOfMemoryError as error:
        raise RunError(f"target {source}: out of memory while loading") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        kind = UsageError if local else RunError
        raise kind(f"target {source}: cannot be loaded: {first_line(error)}") from error
    missing = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if missing:
        raise UsageError(f"target {source}: weights are missing or of the wrong shape: {', '.join(missing[:3])}")
    return model, tokenizer


def _layer_kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    sliding = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return [SLIDING if sliding else FULL] * config.num_hidden_layers


def _rope_types(config: Any) -> set[str]:
    """RoPE types in use; some configs hold one set of parameters a layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(each["rope_type"]) for each in sets if "rope_type" in each}


def _takes_masks_by_type(decoder: Any, windows: dict[str, int | None]) -> bool:
    """Whether the decoder takes a dict of masks: tried, since model code does not declare it."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=decoder.device)
    try:
        with torch.inference_mode():
            decoder(input_ids=ids, attention_mask=dict.fromkeys(windows), use_cache=False)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    stops: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        stops.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(stops)
