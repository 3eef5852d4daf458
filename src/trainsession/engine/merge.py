"""A base model with an adapter merged into its weights, as a Hugging Face directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..tokenization import BUNDLE_FILES
from .lora import Adapter
from .model import LoadedModel, own_config, without_progress_bars


@torch.no_grad()
def export_merged(model: LoadedModel, adapter: Adapter, directory: str | Path) -> None:
    """Write ``W + scale * B A`` of every trained module, config and tokenizer into ``directory``.

    Sums are taken in float32 and stored in the engine's dtype. Tied embeddings are untied where
    the unembedding is trained: the embedding keeps its weights. Loads with transformers.

    Args:
        directory: Made if absent; files of the same names are replaced.
    """
    directory = Path(directory)
    with without_progress_bars():
        merged = AutoModelForCausalLM.from_pretrained(
            model.path, config=own_config(model.path), dtype=model.dtype, local_files_only=True
        )
    unembedding = cast(nn.Linear, merged.get_output_embeddings())
    embedding = cast(nn.Embedding, merged.get_input_embeddings())
    if model.unembedding_name in adapter.weights and unembedding.weight is embedding.weight:
        unembedding.weight = nn.Parameter(unembedding.weight.clone())
        merged.config.get_text_config().tie_word_embeddings = False
        merged.config.tie_word_embeddings = False
    for name, pair in adapter.weights.items():
        weight = merged.get_parameter(f"{name}.weight")
        delta = adapter.scale * (pair.B.float() @ pair.A.float())
        weight.copy_(weight.float() + delta.to(weight.device))
    with without_progress_bars():
        merged.save_pretrained(directory)
    for name in BUNDLE_FILES:
        if name != "generation_config.json" and (model.path / name).is_file():
            shutil.copyfile(model.path / name, directory / name)
