"""Models that the tests of folders save, and what changes a folder that was saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import folder as format
from modelopt_sparse.checkpoint.folder import DESCRIPTION
from tests.helpers import tiny_llama, token_batches
from tests.models.net import net
from tests.models.tiny import tiny_gpt2


def tiny_llama_in_bfloat16() -> LlamaForCausalLM:
    torch.set_default_dtype(torch.bfloat16)  # as from_pretrained builds it: .bfloat16() rounds rotary tables as well
    try:
        return tiny_llama()
    finally:
        torch.set_default_dtype(torch.float32)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "net": net,
    "bfloat16": tiny_llama_in_bfloat16,
}


PRUNED = {"llama": 14, "gpt2": 8, "net": 2, "bfloat16": 14}


WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def inputs_of(name: str) -> Tensor:
    return torch.linspace(-2, 2, 64).view(8, 8) if name == "net" else token_batches(1)[0]


@torch.no_grad()
def outputs(name: str, model: nn.Module) -> Tensor:
    out = model(inputs_of(name))
    return out if isinstance(out, Tensor) else out.logits


def sparse(name: str, **options) -> nn.Module:
    # Net's tied pair is a layer like any other; its head is as well, for nothing says what it is
    return mts.sparsify(MODELS[name](), "magnitude", {"pattern": "2:4", **options})


def scrambled(name: str) -> nn.Module:
    """The same architecture with other weights, dense."""
    model = MODELS[name]()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.full_like(tensor, 7))
    return model


def describe(folder: Path) -> dict:
    return json.loads((folder / DESCRIPTION).read_text())


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    """Edit sparsity.json the way that somebody who knows the format would: the checksum fits again."""
    description = describe(folder)
    del description["checksum"]
    change(description)
    (folder / DESCRIPTION).write_text(json.dumps({**description, "checksum": format.checksum(description)}))


def relist(folder: Path, name: str) -> None:
    """Make sparsity.json agree with a file that has been replaced."""
    entry = format.size_and_hash(folder / name)
    rewrite(folder, lambda description: description["files"].update({name: entry}))


def change_tensors(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit a file of weights or masks, with a description that agrees, if there is one."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # it may be mapped into memory
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    if (file.parent / DESCRIPTION).is_file():
        relist(file.parent, file.name)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def files_of(folder: Path) -> dict[str, bytes]:
    """Path in a folder -> what the file holds."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
