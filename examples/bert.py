"""BERT's forward pass, with modules called as in its checkpoints, and a tokenizer for plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize, scaled_dot_product_attention

__all__ = ["Bert", "sentence_embeddings", "tokens"]


class Bert(nn.Module):
    """The model of a config.json with `"model_type": "bert"`; no dropout, one token type."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        sizes = {
            "word_embeddings": config["vocab_size"],
            "position_embeddings": config["max_position_embeddings"],
            "token_type_embeddings": config["type_vocab_size"],
        }
        self.embeddings = nn.ModuleDict({name: nn.Embedding(size, hidden) for name, size in sizes.items()})
        self.embeddings["LayerNorm"] = nn.LayerNorm(hidden, eps=eps)
        layers = [Layer(config) for _ in range(config["num_hidden_layers"])]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(hidden, hidden)})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The last hidden states [batch, tokens, hidden] of token ids [batch, tokens]; 0 in the mask is padding."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embeddings["word_embeddings"](input_ids) + self.embeddings["token_type_embeddings"].weight[0]
        x = self.embeddings["LayerNorm"](x + self.embeddings["position_embeddings"](places))
        mask = attention_mask.bool()[:, None, None, :]
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
        return x


class Layer(nn.Module):
    """Attention and two products around a GELU, each followed by a sum and a LayerNorm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inter, eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        self.heads = config["num_attention_heads"]
        projections = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")})

        def output(inner: int) -> nn.ModuleDict:
            return nn.ModuleDict({"dense": nn.Linear(inner, hidden), "LayerNorm": nn.LayerNorm(hidden, eps=eps)})

        self.attention = nn.ModuleDict({"self": projections, "output": output(hidden)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, inter)})
        self.output = output(inter)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[batch, tokens, hidden] to the same."""
        first, last = self.attention["self"], self.attention["output"]
        q, k, v = (first[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in ("query", "key", "value"))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = last["LayerNorm"](x + last["dense"](mixed))
        return self.output["LayerNorm"](x + self.output["dense"](gelu(self.intermediate["dense"](x))))


def sentence_embeddings(states: Tensor, attention_mask: Tensor) -> Tensor:
    """[batch, hidden] float32 of length 1: the mean over a sentence's tokens."""
    mask = attention_mask[..., None]
    return normalize((states.float() * mask).sum(1) / mask.sum(1), dim=-1)


def tokens(folder: Path, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids and mask of sentences, by the folder's vocab.txt: lower case, longest pieces first."""
    vocabulary = {piece: number for number, piece in enumerate((folder / "vocab.txt").read_text().splitlines())}
    rows = [[vocabulary["[CLS]"], *_pieces(sentence, vocabulary), vocabulary["[SEP]"]] for sentence in sentences]
    length = max(map(len, rows))
    ids = torch.tensor([row + [vocabulary["[PAD]"]] * (length - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])


def _pieces(sentence: str, vocabulary: Mapping[str, int]) -> list[int]:
    found: list[int] = []
    for word in re.findall(r"\w+|[^\w\s]", sentence.lower()):
        start, pieces = 0, []
        while start < len(word):
            options = (("##" if start else "") + word[start:end] for end in range(len(word), start, -1))
            piece = next((option for option in options if option in vocabulary), None)
            if piece is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[piece])
            start += len(piece) - (2 if start else 0)
        found += pieces
    return found
