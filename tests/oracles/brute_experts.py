"""What fused experts are given, the slow way: token by token, expert by expert, in float64.

Knows nothing of how the package sees routing: each model's mixture is written down by hand from its own code.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracles.brute_force import Seen

Rows = Iterable[tuple[str, int, int, Tensor]]  # parameter, expert, token, row
Visit = Callable[[Any, tuple, dict], Rows]


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def split_halves(made: Tensor) -> Tensor:
    half = len(made) // 2
    return silu(made[:half]) * made[half:]


def gpt_oss_gate(made: Tensor) -> Tensor:
    gate = torch.stack([made[i] for i in range(0, len(made), 2)]).clamp(max=7.0)
    up = torch.stack([made[i] for i in range(1, len(made), 2)]).clamp(-7.0, 7.0)
    return (up + 1) * gate / (1 + (-1.702 * gate).exp())


def step_gate(made: Tensor) -> Tensor:
    half = len(made) // 2
    return silu(made[:half]).clamp(max=0.5) * made[half:].clamp(-0.5, 0.5)


def chosen_experts(module: Any, args: tuple, kwargs: dict) -> Rows:
    """Of a module that is called with hidden states and the experts of each token."""
    hidden, index = (*args, *kwargs.values())[:2]
    for token in range(len(hidden)):
        for expert in index[token].tolist():
            if expert >= len(module.down_proj):  # LongCat-Flash: the identity, in the place of an expert
                continue
            x = hidden[token].double()
            weight = module.gate_up_proj[expert].double()
            if type(module).__name__.removeprefix("Sparse") == "GptOssExperts":
                made = gpt_oss_gate(x @ weight + module.gate_up_proj_bias[expert].double())
            elif type(module).__name__.removeprefix("Sparse") == "Step3p7Experts":
                made = step_gate(weight @ x)
            else:
                made = split_halves(weight @ x)
            yield "gate_up_proj", expert, token, x
            yield "down_proj", expert, token, made


def all_experts(module: Any, args: tuple, kwargs: dict) -> Rows:
    """As if every token were routed to every expert."""
    hidden = (*args, *kwargs.values())[0]
    return chosen_experts(module, (hidden, torch.arange(len(module.gate_up_proj)).expand(len(hidden), -1)), {})


def llama4(module: Any, args: tuple, kwargs: dict, everyone: bool = False) -> Rows:
    """The same of Llama4TextMoe: one expert for each token, whose input is scaled by the sigmoid of its logit."""
    hidden = (*args, *kwargs.values())[0].flatten(0, -2)
    for token in range(len(hidden)):
        logits = module.router.weight.double() @ hidden[token].double()
        for expert in range(len(logits)) if everyone else [int(logits.argmax())]:
            x = hidden[token].double() / (1 + (-logits[expert]).exp())
            yield "experts.gate_up_proj", expert, token, x
            yield "experts.down_proj", expert, token, split_halves(x @ module.experts.gate_up_proj[expert].double())


def inkling_shared(module: Any, args: tuple, kwargs: dict) -> Rows:
    """Every expert sees every token; the router scales what its last matrix is multiplied with."""
    hidden, gammas = (*args, *kwargs.values())
    hidden, gammas = hidden.flatten(0, -2).double(), gammas.reshape(-1, 2).double()
    for token in range(len(hidden)):
        for expert in range(2):
            gate, up = (getattr(module, name)[expert].double() @ hidden[token] for name in ("gate_proj", "up_proj"))
            yield "gate_proj", expert, token, hidden[token]
            yield "up_proj", expert, token, hidden[token]
            yield "down_proj", expert, token, silu(gate) * up * gammas[token, expert]


def jetmoe_mlp(module: Any, args: tuple, kwargs: dict) -> Rows:
    hidden = (*args, *kwargs.values())[0].flatten(0, -2)
    for token in range(len(hidden)):
        x = hidden[token].double()
        for expert in (module.router.layer.weight.double() @ x).topk(2).indices.tolist():
            yield "input_linear.weight", expert, token, x
            yield "output_linear.weight", expert, token, split_halves(module.input_linear.weight[expert].double() @ x)


def jetmoe_attention(module: Any, args: tuple, kwargs: dict) -> Rows:
    """Attention one token at a time: a token's experts make its queries, and take the attention's result of these."""
    hidden = (*args, *kwargs.values())[0].double()
    cos, sin = (x.double() for x in kwargs["position_embeddings"])
    mask, experts = kwargs["attention_mask"], module.experts
    heads, width = module.num_key_value_heads, module.head_dim

    def turned(x: Tensor, row: int, at: int) -> Tensor:
        halves = torch.cat([-x[:, width // 2 :], x[:, : width // 2]], -1)
        return x * cos[row % len(cos), at] + halves * sin[row % len(sin), at]

    for row in range(hidden.shape[0]):
        length = hidden.shape[1]
        keys, values = (module.kv_proj.weight.double() @ hidden[row].T).T.chunk(2, -1)
        keys = torch.stack([turned(keys[at].view(heads, width), row, at) for at in range(length)])
        values = values.view(length, heads, width)
        for at in range(length):
            x = hidden[row, at]
            for expert in (experts.router.layer.weight.double() @ x).topk(2).indices.tolist():
                query = turned((experts.input_linear.weight[expert].double() @ x).view(heads, width), row, at)
                scores = torch.einsum("hd,shd->hs", query, keys) / width**0.5
                seen = torch.arange(length) <= at
                if mask is not None:
                    allowed = mask[row, 0, at]
                    seen = allowed if allowed.dtype == torch.bool else allowed == 0
                probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
                result = torch.einsum("hs,shd->hd", probabilities, values).flatten()
                token = row * length + at
                yield "experts.input_linear.weight", expert, token, x
                yield "experts.output_linear.weight", expert, token, result


VISITS: dict[str, Visit] = {
    "Llama4TextMoe": llama4,
    "JetMoeMoE": jetmoe_mlp,
    "GraniteMoeMoE": jetmoe_mlp,  # as transformers 5.0 has it; later it is called like most others
    "JetMoeAttention": jetmoe_attention,
    "InklingSharedExperts": inkling_shared,
}


@torch.no_grad()
def brute_experts(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], within: list[str], *, everyone: bool = False
) -> tuple[Seen, dict]:
    """Gram matrices [E, C, C] and row counts by parameter name, without padding; and the counts [E] of each expert.

    ``everyone``: as if every token were routed to every expert."""
    seen, counts = Seen(), {}
    real: Any = None

    def hook_for(path: str, module: Any, visit: Visit):
        def hook(module: Any, args: tuple, kwargs: dict) -> None:
            for param, expert, token, row in visit(module, args, kwargs):
                name = f"{path}.{param}"
                experts = model.get_parameter(name).shape[0]
                gram = seen.grams.setdefault(name, torch.zeros(experts, len(row), len(row), dtype=torch.float64))
                count = counts.setdefault(name, [0] * experts)
                if real is None or real[token]:
                    gram[expert] += row[:, None] * row
                    count[expert] += 1

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    handles = []
    for path, module in model.named_modules():
        kind = type(module).__name__.removeprefix("Sparse")
        visit = VISITS.get(kind) if kind != "GraniteMoeMoE" or hasattr(module, "input_linear") else None
        if kind != "Llama4TextExperts" and isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            visit = all_experts if everyone else chosen_experts
        if everyone and kind == "Llama4TextMoe":
            visit = partial(llama4, everyone=True)
        if visit is not None and any(path.startswith(f"{block}.") for block in within):
            handles.append(hook_for(path, module, visit))
    for batch in batches:
        real = batch["attention_mask"].flatten().bool() if "attention_mask" in batch else None
        model(**batch)
    for handle in handles:
        handle.remove()
    stacked = [name for name, p in model.named_parameters() if p.dim() == 3 and name.startswith(tuple(within))]
    convolutions = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    assert counts.keys() == set(stacked) - convolutions
    seen.tokens = {name: sum(count) for name, count in counts.items()}
    return seen, counts


def stored_as_matrices(model: nn.Module, name: str) -> Tensor:
    """A fused parameter as [E, R, C]: gpt-oss and Llama 4 hold it as [E, C, R]."""
    weight = model.get_parameter(name).detach()
    return weight.transpose(1, 2) if type(model).__name__.startswith(("GptOss", "Llama4")) else weight
