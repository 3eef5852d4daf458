"""LoRA adapters (Hu et al. 2021): ``W x + (alpha / rank) * B A x``, float32, one per session.

Shapes: K inputs, N outputs of a module, R rank. A is (R, K), B is (N, R).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..errors import InvalidRequest
from ..types import LoraConfig
from .linear import MultiLoraLinear


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The two factors of one module's update."""

    A: nn.Parameter
    B: nn.Parameter


class Adapter:
    """One session's LoRA weights, or a frozen copy of them.

    Attributes:
        config: As asked for; its ``seed`` is set.
        scale: ``alpha / rank``.
        weights: By module name (``"model.layers.0.self_attn.q_proj"``, ``"lm_head"``).
    """

    __slots__ = ("config", "scale", "weights")

    def __init__(self, config: LoraConfig, weights: dict[str, LoraPair]) -> None:
        self.config = config
        self.scale = config.scale
        self.weights = weights

    def parameters(self) -> list[nn.Parameter]:
        """A and B of every module, in the modules' order."""
        return [matrix for pair in self.weights.values() for matrix in (pair.A, pair.B)]

    def frozen_copy(self) -> Adapter:
        """A copy that later steps of this adapter don't touch, without gradients."""
        return Adapter(self.config, {name: _frozen(pair) for name, pair in self.weights.items()})

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.parameters())
        return f"Adapter(rank={self.config.rank}, {len(self.weights)} modules, {size:,} parameters)"


def _frozen(pair: LoraPair) -> LoraPair:
    return LoraPair(
        nn.Parameter(pair.A.detach().clone(), requires_grad=False),
        nn.Parameter(pair.B.detach().clone(), requires_grad=False),
    )


def initial_a(seed: int, module: str, rank: int, in_features: int) -> np.ndarray:
    """A's initial values (R, K) in float32: uniform within ``1 / sqrt(K)``.

    That is PEFT's ``kaiming_uniform_(a=sqrt(5))``. The stream is PCG64 seeded with
    sha256(seed, module), so neither device, nor targets, nor their order changes a module's values.
    """
    digest = hashlib.sha256(f"{seed}/{module}".encode()).digest()
    stream = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    bound = 1.0 / math.sqrt(in_features)
    return stream.uniform(-bound, bound, (rank, in_features)).astype(np.float32)


def target_names(config: LoraConfig, modules: Mapping[str, MultiLoraLinear]) -> list[str]:
    """The modules that this configuration trains, in the model's order.

    ``train_attn``, ``train_mlp`` and ``train_unembed`` choose by what the module belongs to;
    fused expert tensors and routers are no linear layers and are never trained.

    Raises:
        InvalidRequest: a target module matches nothing, or nothing at all would train.
    """
    endings = sorted({name.rsplit(".", 1)[-1] for name in modules})
    if config.target_modules is not None:
        for ending in config.target_modules:
            if not any(_matches(name, ending) for name in modules):
                raise InvalidRequest(
                    f"target_modules: {ending!r} matches no module; the model has {', '.join(endings)}",
                    details={"key": "target_modules", "module": ending, "available": endings},
                )
        return [name for name in modules if any(_matches(name, ending) for ending in config.target_modules)]
    flags = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
    names = [name for name, module in modules.items() if flags.get(module.group, False)]
    if not names:
        chosen = ", ".join(f"train_{group}" for group, chosen in flags.items() if chosen)
        raise InvalidRequest(
            f"{chosen} matches no linear layer of this model (fused expert tensors are not LoRA targets); "
            f"it has {', '.join(endings)}",
            details={"available": endings},
        )
    return names


def _matches(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)


def new_adapter(config: LoraConfig, modules: Mapping[str, MultiLoraLinear], device: torch.device) -> Adapter:
    """A fresh adapter: A seeded, B zero, so that it changes nothing yet.

    Raises:
        InvalidRequest: see `target_names`; or ``config.seed`` is missing.
    """
    if config.seed is None:
        raise InvalidRequest("LoraConfig.seed is not set: the service draws one", details={"key": "seed"})
    weights: dict[str, LoraPair] = {}
    for name in target_names(config, modules):
        module = modules[name]
        values = initial_a(config.seed, name, config.rank, module.in_features)
        a = torch.from_numpy(values).to(device)
        b = torch.zeros(module.out_features, config.rank, dtype=torch.float32, device=device)
        weights[name] = LoraPair(nn.Parameter(a), nn.Parameter(b))
    return Adapter(config, weights)
