"""Small models and data that several test files use."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
TESTBED = ROOT / "examples" / "testbed"


def tiny_llama(**changes) -> LlamaForCausalLM:
    """A Llama of random weights: 2 blocks, 32 wide, grouped-query attention, tied embeddings unless changed."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def token_batches(count: int = 3, batch: int = 2, length: int = 16, vocab: int = 97, seed: int = 1) -> list[Tensor]:
    """``count`` batches [batch, length] of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (batch, length), generator=generator) for _ in range(count)]


def correlated_inputs(tokens: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Inputs [tokens, columns] whose Gram matrix has a decaying spectrum and a few outlier channels."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    spectrum = torch.arange(1, columns + 1, dtype=torch.float64) ** -0.7
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) * spectrum @ mix
    x[:, :: max(columns // 4, 1)] *= 5
    return x.to(dtype)


def trained_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(TESTBED / "tiny-llama", dtype=dtype)


def trained_windows(file: str, length: int = 512) -> Tensor:
    """A testbed text as windows [n, length] of token ids, by the protocol of its README."""
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    text = (TESTBED / file).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return ids[: len(ids) // length * length].view(-1, length)


def state_of(model: nn.Module) -> dict[str, tuple[type, Tensor]]:
    """Every parameter and buffer, copied, with the class of the module that holds it."""
    state = {}
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            state[f"{path}.{name}"] = (type(module), tensor.detach().clone())
    return state


def assert_same_state(model: nn.Module, before: dict[str, tuple[type, Tensor]]) -> None:
    after = state_of(model)
    assert after.keys() == before.keys()
    for name, (cls, tensor) in after.items():
        assert cls is before[name][0], name
        assert_bits(tensor, before[name][1])


def assert_bits(a: Tensor, b: Tensor) -> None:
    """Equal to the bit, signs of zeros included."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    as_bytes = [x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b)]
    assert torch.equal(*as_bytes)


def run_python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new Python process in the project's root, on one thread; its output is captured."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
