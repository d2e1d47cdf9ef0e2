"""What a sparse folder is worth: perplexity and KL from dense on given texts, and where its zeros are.

Runs in the driver's process, the same for the output of every tool.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts

SEQ_LEN = 512


def cut(tokenizer: Any, text: str, count: int | None = None) -> Tensor:
    """The first ``count`` windows [n, SEQ_LEN] of a text (all without it), tokenized whole, no special tokens."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return ids[: len(ids) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)[:count]


def cpp_headers(windows: int) -> str:
    """Text of another domain that is on every machine with torch: its c10 headers, sorted by path, joined.

    Written by hand; ATen's begin with 65 % of generated ``#include`` lines, which say nothing about a model.
    """
    headers = sorted((Path(torch.__file__).parent / "include" / "c10").rglob("*.h"))
    text = "".join(header.read_text(encoding="utf-8") for header in headers)
    return text[: 16 * SEQ_LEN * windows]  # 16 characters a token: more than enough, and no more to tokenize


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def block_linears(model: Any) -> dict[str, nn.Linear]:
    """The layers that every tool is to prune: all but the output head."""
    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


@torch.no_grad()
def measure(folder: Path, dense: Any, pattern: str | None, texts: dict[str, Tensor]) -> dict[str, Any]:
    """``texts``: windows [n, SEQ_LEN] by name. Raises ValueError if another matrix than the block Linears' changed."""
    model = load(folder)
    layers = block_linears(model)
    ours = {f"{name}.weight" for name in layers}
    for name, value in dense.named_parameters():
        if value.dim() > 1 and name not in ours and not torch.equal(value, model.get_parameter(name)):
            raise ValueError(f"{name} differs from the dense model's: of the matrices only the block Linears' may")
    zeros = {name: int((layer.weight == 0).sum()) for name, layer in layers.items()}
    found: dict[str, Any] = {
        "layers": len(layers),
        "layers_with_zeros": sum(count > 0 for count in zeros.values()),
        "zeros": sum(zeros.values()) / sum(layer.weight.numel() for layer in layers.values()),
        "holds": None,  # unstructured: the fraction of zeros says it all
    }
    if pattern is not None and ":" in pattern:
        nm = mts.NM(*map(int, pattern.split(":")))
        found["holds"] = all(nm.count_nonzero_wrong(layer.weight) == 0 for layer in layers.values())
    for name, windows in texts.items():
        result = mts.evaluate(model, windows.flatten(), seq_len=SEQ_LEN, reference=dense, progress=False)
        found[name] = {"perplexity": result.perplexity, "kl": result.kl}
    return found
