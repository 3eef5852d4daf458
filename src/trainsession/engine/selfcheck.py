"""What is verified of every base model when it is loaded, on a few random tokens.

Our packed passes must give what transformers' own forward gives, else the architecture has
something that this engine does not know; and in exact mode a row must have the same bits alone,
in a crowd, and at any place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ..errors import EngineError
from .context import DECODE_TILE, PASS_TILE, TRAINING_TILES, PassContext, Segment
from .linear import find_siblings
from .products import PackedWeight, add_row_products, row_products

if TYPE_CHECKING:
    from .linear import MultiLoraLinear
    from .model import LoadedModel

_LENGTHS = (24, 9)
_TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Of the largest logit. Rounding measured on two-layer and 30-layer models is ten times smaller."""


@dataclass(slots=True)
class SequenceAttention:
    """Plain causal attention of packed sequences, and the windows that each layer asked for."""

    lengths: tuple[int, ...]
    windows: dict[int, int | None]

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self.windows[layer] = window
        outputs: list[torch.Tensor] = []
        for q, k, v in zip(
            q_THD.split(self.lengths), k_TGD.split(self.lengths), v_TGD.split(self.lengths), strict=True
        ):
            at = torch.arange(q.shape[0], device=q.device)
            mask = at[:, None] >= at[None, :]
            if window is not None:
                mask &= at[:, None] - at[None, :] < window
            out = functional.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=scale, enable_gqa=True
            )
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)


def _check_tokens(vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).to(device) for length in _LENGTHS]


@torch.inference_mode()
def plain_logits(causal: PreTrainedModel) -> torch.Tensor:
    """transformers' own logits (T, V) of the check's sequences, each run alone, as float32."""
    embedding = causal.get_input_embeddings().weight
    sequences = _check_tokens(embedding.shape[0], embedding.device)  # type: ignore[index, arg-type]
    return torch.cat([causal(input_ids=tokens[None], use_cache=False).logits[0].float() for tokens in sequences])


@torch.inference_mode()
def packed_pass(
    model: LoadedModel, sequences: list[torch.Tensor], tile: int = PASS_TILE
) -> tuple[torch.Tensor, torch.Tensor, SequenceAttention]:
    """Hidden states (T, E) and logits (T, V) of base-model sequences in one packed pass."""
    attention = SequenceAttention(tuple(len(tokens) for tokens in sequences), {})
    segments = [Segment(None, 0, sum(attention.lengths))]
    positions = torch.cat([torch.arange(len(tokens), device=model.device) for tokens in sequences])
    h_TE = model.hidden(torch.cat(sequences), positions, PassContext(segments, attention, tile))
    return h_TE, model.logits(h_TE, segments, tile=tile), attention


def check_against_transformers(model: LoadedModel, expected_TV: torch.Tensor) -> None:
    """Raise `EngineError` where our logits differ from ``expected_TV``, or windows from the config.

    The first pass finds which layers share their input; the second one is checked.

    In reduced precision a quarter of the rows may differ: a router at a tie picks another expert.
    """
    kind = type(model.causal).__name__
    sequences = _check_tokens(model.vocab_size, model.device)
    find_siblings(model.lora_modules.values(), lambda: packed_pass(model, sequences))
    _, logits_TV, attention = packed_pass(model, sequences)
    scale = expected_TV.abs().amax().clamp_min(1e-6)
    error_T = (logits_TV.float() - expected_TV).abs().amax(-1) / scale
    allowed = _TOLERANCE[model.dtype]
    share = 1.0 if model.dtype == torch.float32 else 0.75
    if not (error_T <= allowed).float().mean() >= share:
        raise EngineError(
            f"{model.name}: {kind} gives other logits here than in transformers' own forward (largest difference "
            f"{error_T.max().item():.1e} of the largest logit, allowed {allowed:.0e}): it is not supported",
            details={"architecture": kind},
        )
    config = model.causal.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None and getattr(config, "sliding_window", None) is None:
        return
    for layer, window in attention.windows.items():
        slides = layer_types[layer] == "sliding_attention" if layer_types is not None else True
        if slides != (window is not None):
            raise EngineError(
                f"{model.name}: {kind} does not pass layer {layer}'s sliding window to its attention: not supported",
                details={"architecture": kind, "features": ["sliding_window"]},
            )


def find_inexact(model: LoadedModel) -> str | None:
    """Why this model's rows are not bit-equal alone and in a crowd on this machine; None: they are."""
    if any("experts" in name for name, _ in model.causal.named_parameters()):
        return "its experts are products over however many rows are routed to them"
    for module in _one_of_each_shape(model):
        # The unembedding never sees the larger tiles.
        tiles = (PASS_TILE,) if module.group == "unembed" else TRAINING_TILES
        for tile in (DECODE_TILE, *tiles):
            for weight_KN in (module.weight.t(), module.weight):
                with torch.inference_mode():
                    x_TK = _equal_rows(weight_KN, tile)
                    out = row_products(x_TK, weight_KN, tile)
                    added = out.clone()
                    add_row_products(added, x_TK, weight_KN, tile)
                if not (_rows_are_equal(out) and _rows_are_equal(added)):
                    return f"a product of {tile} rows with {module.name} depends on a row's place"
    first, second = _check_tokens(model.vocab_size, model.device)
    for tile in (DECODE_TILE, PASS_TILE):
        alone_h, alone_logits, _ = packed_pass(model, [second], tile)
        crowd_h, crowd_logits, _ = packed_pass(model, [first] * 5 + [second, first], tile)
        rows = slice(5 * len(first), 5 * len(first) + len(second))
        if not (torch.equal(alone_h, crowd_h[rows]) and torch.equal(alone_logits, crowd_logits[rows])):
            return f"{type(model.causal).__name__} gives a row other bits in a crowd"
    return None


@torch.inference_mode()
def can_pack(model: LoadedModel) -> bool:
    """Whether sampling passes may use a `PackedWeight` here: device, dtype, CPU and torch decide."""
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    for module in _one_of_each_shape(model):
        weight_KN = module.weight.t()
        for tile in (DECODE_TILE, PASS_TILE):
            x_TK = _equal_rows(weight_KN, tile)
            try:
                out = PackedWeight(module.weight, DECODE_TILE).row_products(x_TK, tile)
            except (AttributeError, RuntimeError):  # an operator that this torch lacks, a dtype that this CPU lacks
                return False
            expected = row_products(x_TK, weight_KN, tile).float()
            close = (out.float() - expected).abs().amax() <= _TOLERANCE[model.dtype] * expected.abs().amax()
            if not close or (model.exact and not _rows_are_equal(out)):
                return False
    return True


def _one_of_each_shape(model: LoadedModel) -> Iterable[MultiLoraLinear]:
    return {module.weight.shape: module for module in model.lora_modules.values()}.values()


def _equal_rows(weight_KN: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.linspace(-1, 1, weight_KN.shape[0], device=weight_KN.device).to(weight_KN.dtype).repeat(rows, 1)


def _rows_are_equal(x: torch.Tensor) -> bool:
    return torch.equal(x, x[:1].expand_as(x))
