"""One side of a comparison: the jobs, and a program that runs them with the checkout that is in its path.

    python tests/same_bits/jobs.py CHECKOUT RESULTS SUBSTRING

What a job gives is compared with what it gives on the other side; "outcome" says by itself how the job ended.
"""

import hashlib
import io
import json
import os
import re
import runpy
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as hf
from differences import differences
from torch import Tensor, nn

import modelopt_sparse as mts

Result = dict[str, Any]
Job = Callable[[], Result]

TESTBED = Path(__file__).resolve().parent.parent.parent / "examples" / "testbed"
TIMES = re.compile(r"(?<![\d.])\d+\.\d\d(?![\d%])|\d+\.\d(?= s of )")  # as tables and last lines print seconds
NOT_COMPARED = ("seconds", "versions", "checksum")  # a checksum is of the whole file, its times and versions included
BEGUN = "began"
VOCAB, WIDTH, INNER = 97, 32, 64


# models ---------------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": INNER, "head_dim": 8, "attention_chunk_size": 16}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "eos_token_id": 2}
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": INNER, "num_layers": 2, "num_decoder_layers": 2}


class Tied(nn.Module):
    """No stack of blocks, and two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


def transformer(name: str, config: str, **settings: Any) -> nn.Module:
    return getattr(hf, name)(getattr(hf, config)(**settings))


def llama(**changes: Any) -> nn.Module:
    return transformer("LlamaForCausalLM", "LlamaConfig", **{**SIZES, "tie_word_embeddings": True, **changes})


def cnn() -> nn.Module:
    convolutions = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=4), nn.ReLU())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 16))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, INNER, batch_first=True), 2)


def tokens(count: int = 4, length: int = 12, vocab: int = VOCAB) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (2, length), generator=generator) for _ in range(count)]


def ragged(side: str = "right") -> list[dict[str, Tensor]]:
    """Batches of unequal lengths, and with padding on one side of all rows but the first."""
    batches = []
    for seed, (rows, length) in enumerate(((2, 11), (3, 7), (1, 5), (2, 9))):
        ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
        real = torch.arange(length) < torch.tensor([max(length - 3 * row, 2) for row in range(rows)])[:, None]
        real = real if side == "right" else real.flip(1)
        batches.append({"input_ids": ids.masked_fill(~real, 1), "attention_mask": real.long()})
    return batches


def pairs() -> list[dict[str, Tensor]]:
    """For a decoder behind an encoder, each with padding of its own."""
    decoder = [{f"decoder_{name}": value for name, value in batch.items()} for batch in ragged("left")]
    return [{**batch, **other} for batch, other in zip(ragged(), decoder)]


def vectors(*shape: int) -> list[Tensor]:
    return list(torch.randn(3, 4, *shape, generator=torch.Generator().manual_seed(1)))


def sequences() -> list[dict[str, Tensor]]:
    masks = [batch["attention_mask"] == 0 for batch in ragged()]
    generator = torch.Generator().manual_seed(1)
    return [{"src": torch.randn(*x.shape, WIDTH, generator=generator), "src_key_padding_mask": x} for x in masks]


# name -> how the model is made, and its calibration data
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "llama": (llama, tokens),
    "llama of three": (partial(llama, num_hidden_layers=3), tokens),
    "untied llama": (partial(llama, tie_word_embeddings=False, vocab_size=96), partial(tokens, vocab=96)),
    "gpt2": (partial(transformer, "GPT2LMHeadModel", "GPT2Config", **GPT2), ragged),
    "t5": (partial(transformer, "T5ForConditionalGeneration", "T5Config", **T5, num_heads=4), pairs),
    "albert": (partial(transformer, "AlbertForMaskedLM", "AlbertConfig", **SIZES, embedding_size=16), ragged),
    "mixtral": (partial(transformer, "MixtralForCausalLM", "MixtralConfig", **SIZES, **EXPERTS), ragged),
    "gpt-oss": (partial(transformer, "GptOssForCausalLM", "GptOssConfig", **SIZES, **EXPERTS, head_dim=8), ragged),
    "llama4": (partial(transformer, "Llama4ForCausalLM", "Llama4TextConfig", **SIZES, **LLAMA4), ragged),
    "jetmoe": (partial(transformer, "JetMoeForCausalLM", "JetMoeConfig", **SIZES, **EXPERTS, kv_channels=8), ragged),
    "cnn": (cnn, partial(vectors, 3, 12, 12)),
    "encoder": (encoder, sequences),
    "tied": (Tied, partial(vectors, WIDTH)),
}


def built(name: str) -> Any:
    """The model in evaluation mode, with weights of a size that lets every layer matter."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def with_data(name: str, options: dict[str, Any]) -> dict[str, Any]:
    own = {"data", "data_loader", "forward_loop"} & options.keys()
    return {"progress": False, **({} if own else {"data_loader": MODELS[name][1]()}), **options}


def text() -> dict[str, Any]:
    """Calibration text, cut into few and short windows."""
    words = (TESTBED / "calibration.txt").read_text(encoding="utf-8")[:20_000]
    tokenizer = hf.AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    return {"data": words, "tokenizer": tokenizer, "num_samples": 8, "seq_len": 32, "batch_size": 2}


# methods of a user's own ----------------------------------------------------------------------------------------------


class NormPower(mts.Method):
    """Chooses a mask, and has an option."""

    name = "norm_power"
    needs = "square_sums"
    options = {"power": 1.0}

    def solve(self, weight, state, pattern, options):
        norms = state.square_sums.sqrt().unsqueeze(-2)
        score = weight.abs().to(norms.dtype) * norms ** options["power"]
        return mts.masked_solution(weight, pattern.mask(score), state)


class Refit(mts.Method):
    """Solves for the values of the largest weights, and shares the Gram matrix of layers with one input."""

    name = "refit"
    needs = "gram"
    updates = True

    def prepare(self, stats, options):
        return stats, stats.gram + 0.01 * stats.gram.diagonal().mean() * torch.eye(len(stats.gram))

    def solve(self, weight, state, pattern, options):
        stats, gram = state
        mask = pattern.mask(weight.abs())
        values = torch.zeros_like(weight)
        for row, stays in enumerate(mask):
            values[row, stays] = torch.linalg.solve(gram[stays][:, stays], gram[stays] @ weight[row])
        return mts.Solution(values, mask, mts.relative_error(weight, values, stats), ("refitted row by row",))


class Stopping(NormPower):
    """Is interrupted once, when it is given its ``at``-th layer."""

    name = "stopping"

    def __init__(self, at: int = 0) -> None:
        self.at, self.calls = at, 0

    def solve(self, weight, state, pattern, options):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return super().solve(weight, state, pattern, options)


# what is compared -----------------------------------------------------------------------------------------------------


def digest(values: Tensor) -> str:
    data = values.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{values.dtype} {list(values.shape)} {hashlib.sha256(data).hexdigest()}"


def without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): without_times(each) for key, each in value.items() if key not in NOT_COMPARED}
    if isinstance(value, (list, tuple)):
        return [without_times(each) for each in value]
    return value.replace(str(Path.cwd()), "HERE") if isinstance(value, str) else value


def plan_of(model: nn.Module, method: Any, options: Mapping[str, Any]) -> Result:
    plan = mts.make_plan(model, method, **options)
    timed = torch.backends.mkldnn.matmul.fp32_precision == "none"  # type: ignore[attr-defined]
    assert not timed or sum(torch.Size(layer.shape).numel() for layer in plan.layers) < 2**20
    return {"printed": str(plan), "as dict": plan.as_dict()}


def result_of(model: nn.Module) -> Result:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {name: digest(values) for name, values in named},
        "masks": {name: digest(mask) for name, mask in mts.named_masks(model)},
        "report": without_times(mts.report(model).as_dict()),
        "verified": outcome(lambda: str(mts.verify(model))),
    }


def files_in(folder: str | Path) -> Result:
    files = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.name == "sparsity.json":
            files[path.name] = without_times(json.loads(path.read_text(encoding="utf-8")))
        elif path.is_file():
            files[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return files


def outcome(run: Callable[[], Any]) -> Any:
    """What it gives back, or the error that it raises."""
    try:
        return run()
    except (ValueError, TypeError) as error:
        return without_times(f"{type(error).__name__}: {error}")


# jobs in memory -------------------------------------------------------------------------------------------------------


def sparse(name: str, method: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Result:
    model, options = built(name).to(dtype), with_data(name, options)
    plan = plan_of(model, method, options)
    mts.sparsify(model, method, **options)
    return {"plan": plan, **result_of(model)}


def by_masks(**options: Any) -> Result:
    layers = {f"{name}.weight": x.weight for name, x in built("llama").named_modules() if name.endswith("_proj")}
    masks = {name: x.abs() >= x.abs().median(1, keepdim=True).values for name, x in layers.items()}
    return sparse("llama", None, masks=masks, pattern=0.5, **options)


def loop(model: nn.Module) -> None:
    for batch in tokens():
        model(batch)


def twice() -> Result:
    model = built("llama")
    mts.sparsify(model, "magnitude", pattern="1:4", exclude="*.down_proj", progress=False)
    mts.sparsify(model, "wanda", include="*.1.mlp.*", **with_data("llama", {}))
    return result_of(model)


def stopped_in_memory() -> Result:
    """The first results are of a model one of whose blocks is done, the others of the same call, repeated."""
    model, method = built("llama"), Stopping(at=10)
    try:
        mts.sparsify(model, method, **with_data("llama", {}))
    except KeyboardInterrupt:
        first = result_of(model)
    mts.sparsify(model, method, **with_data("llama", {}))
    return {"first": first, "then": result_of(model)}


def trained() -> Result:
    """Momentum is older than the masks."""
    model = built("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gradients: list[Tensor] = []
    for step, batch in enumerate(tokens()):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            mts.sparsify(model, "magnitude", progress=False)
            mts.attach_optimizer(optimizer, model)
            mts.observe_gradient(model, "model.layers.0.mlp.up_proj.weight", gradients.append)
    return {"gradients": [digest(gradient) for gradient in gradients], **result_of(model)}


def written(name: str, **options: Any) -> Result:
    """Saved, restored into a new model, loaded if it is transformers', and exported."""
    model = mts.sparsify(built(name), "wanda", **with_data(name, options))
    mts.save(model, "sparse", **({"max_shard_size": "20KB"} if name == "llama" else {}))
    results = {"files": files_in("sparse"), "restored": result_of(mts.restore(built(name), "sparse"))}
    if name != "tied":
        results["loaded"] = result_of(mts.load("sparse"))
        results["verified"] = [str(mts.verify("sparse")), outcome(lambda: str(mts.verify("sparse", "1:4")))]
    return {**results, "exported": result_of(mts.export(model))}


def set_by_hand() -> Result:
    model = built("llama")
    generator = torch.Generator().manual_seed(1)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        mts.set_mask(model, name, mts.NM(2, 4).mask(torch.rand(model.get_parameter(name).shape, generator=generator)))
    mts.save(model, "sparse")
    return {"files": files_in("sparse"), "verified": str(mts.verify(mts.load("sparse"), "2:4"))}


def offloaded() -> Result:
    model = built("llama")
    accelerate.cpu_offload(model, torch.device("cpu"))
    mts.sparsify(model, "sparsegpt", **with_data("llama", {}))
    mts.save(model, "sparse")
    return {"files": files_in("sparse")}


def testbed(method: Any, **options: Any) -> Result:
    """The embedded model in float32, which is large enough to have its products timed if nothing says how they are."""
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, setting.fp32_precision = setting.fp32_precision, "ieee"
    try:
        dense, model = (hf.LlamaForCausalLM.from_pretrained(TESTBED / "tiny-llama", dtype="float32") for _ in "ab")
        options = {"progress": False, **text(), **options}
        plan = plan_of(model, method, options)
        mts.sparsify(model, method, **options)
        words = (TESTBED / "heldout.txt").read_text(encoding="utf-8")[:5_000]
        ids = options["tokenizer"](words, return_tensors="pt")["input_ids"][0]
        evaluation = mts.evaluate(model, ids, seq_len=64, reference=dense, progress=False)
        return {"plan": plan, "evaluation": evaluation.as_dict(), **result_of(model)}
    finally:
        setting.fp32_precision = before


def plans() -> Result:
    """Of models without values."""
    results = {}
    for name, (make, _) in MODELS.items():
        with torch.device("meta"):
            model = make()
        for options in ({}, {"pattern": 0.5, "polish": True}, {"quality": "best", "memory_limit": "1MB"}):
            results[f"{name} {options}"] = outcome(partial(plan_of, model, None, options))
    return results


REFUSED: dict[str, Any] = {
    "typo": {"patern": "2:4"},
    "method": {"method": "sparsegtp"},
    "no data": {"data_loader": None},
    "two sources": {"forward_loop": loop},
    "glob": {"include": "*.nowhere"},
    "pattern": {"pattern": "3:7"},
    "values": {"update": False, "polish": True},
    "uniform": {"allocation": "search"},
    "number": {"min_tokens": 0},
    "batches": {"data_loader": []},
    "damping": {"damping": -1},
}


def refused() -> Result:
    model = built("llama")
    calls = {why: {"method": "sparsegpt", **with_data("llama", options)} for why, options in REFUSED.items()}
    return {why: outcome(partial(mts.sparsify, model, **options)) for why, options in calls.items()}


# jobs of two processes ------------------------------------------------------------------------------------------------


def in_two(name: str, method: Any, **options: Any) -> Result:
    """Forked from this process, which is why these jobs come first: no gradient has been taken here yet."""
    mp.start_processes(in_one_of_two, (name, method, options), nprocs=2, start_method="fork")
    return {f"rank {rank}": json.loads(Path(f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)}


def in_one_of_two(rank: int, name: str, method: Any, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
    result = sparse(name, method, **options)
    Path(f"{rank}.json").write_text(json.dumps(result, default=str), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


# jobs with folders ----------------------------------------------------------------------------------------------------


def stream(name: str, method: Any, **options: Any) -> Result:
    built(name).save_pretrained("dense")
    report = mts.sparsify_checkpoint("dense", "sparse", method, **with_data(name, options))
    beside = sorted(path.name for path in Path.cwd().iterdir())
    verified = outcome(lambda: str(mts.verify("sparse")))
    return {"report": without_times(report.as_dict()), "files": files_in("sparse"), "all": beside, "verified": verified}


def begin_streaming(folder: Path, method: mts.Method, **options: Any) -> None:
    """One of three blocks is done, and the second one is begun."""
    built("llama of three").save_pretrained(folder / "dense")
    try:
        mts.sparsify_checkpoint(folder / "dense", folder / "sparse", method, **with_data("llama", options))
    except KeyboardInterrupt:
        return
    raise AssertionError("the run was not interrupted")


def go_on_streaming(folder: Path, method: mts.Method, **options: Any) -> Result:
    """The folder of the run that goes on, and of one that nobody has disturbed; they are to be the same."""
    mts.sparsify_checkpoint(folder / "dense", folder / "sparse", method, **with_data("llama", options))
    mts.sparsify_checkpoint(folder / "dense", folder / "fresh", Stopping(), **with_data("llama", options))
    results = {name: files_in(folder / name) for name in ("sparse", "fresh")}
    notes = [files["sparsity.json"]["report"].pop("notes") for files in results.values()]
    assert notes[0][-1] == "1 of 3 blocks were reused from a stopped run", notes
    differing = differences(results["sparse"], results["fresh"])
    assert not differing, f"not the folder of a run that nobody has disturbed: {differing}"
    return {"files": results["sparse"], "notes": notes}


def stopped_stream(**options: Any) -> Result:
    method = Stopping(at=10)
    begin_streaming(Path(), method, **options)
    complete = Path("sparse").exists()
    results = go_on_streaming(Path(), method, **options)
    return {**results, "complete when it was stopped": complete, "layers solved": method.calls}


def across(shared: Path) -> Result:
    """The side that comes first begins a run and is stopped, the other one goes on with it, or refuses to."""
    if not (shared / "dense").exists():
        begin_streaming(shared, Stopping(at=10))
        return {"outcome": BEGUN}
    try:
        go_on_streaming(shared, Stopping())
    except ValueError as error:
        if "started with something else" not in str(error):
            raise
        return {"outcome": f"refused, with what differs: {error}"}
    return {"outcome": "goes on, to the folder of a run that nobody has disturbed"}


def command(*words: str) -> Result:
    """What `python -m modelopt_sparse` prints, and its exit code; in this process, which has imported everything."""
    out, err, code = io.StringIO(), io.StringIO(), None
    before, sys.argv = sys.argv, ["modelopt_sparse", *words]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_module("modelopt_sparse", run_name="__main__")
    except SystemExit as done:
        code = done.code
    finally:
        sys.argv = before
    try:
        printed = without_times(json.loads(out.getvalue()))
    except ValueError:
        printed = [re.sub(r"[ -]+", " ", TIMES.sub("#", line)) for line in out.getvalue().splitlines()]
    complaints = [line for line in err.getvalue().splitlines() if line.startswith("modelopt-sparse:")]
    return {"code": code, "printed": without_times(printed), "complaints": without_times(complaints)}


def commands(*lines: str) -> Result:
    """Command lines on a small model with a tokenizer, in ``dense``, and text in ``text.txt``."""
    torch.manual_seed(0)
    llama(vocab_size=2048).save_pretrained("dense")
    text()["tokenizer"].save_pretrained("dense")
    Path("text.txt").write_text(text()["data"], encoding="utf-8")
    results: Result = {line: command(*line.split()) for line in lines}
    return {**results, "files": {str(path): files_in(path) for path in Path().glob("sparse*")}}


# the list -------------------------------------------------------------------------------------------------------------

SAMPLES = "--data text.txt --num-samples 8 --seq-len 32 --batch-size 2"
SPARSIFY = f"sparsify dense --out sparse --no-progress {SAMPLES}"
MAGNITUDE = "sparsify dense --out sparse --no-progress --method magnitude"
MODES = [("sparsegpt", {"nn.Linear": {"*": {}, "*.k_proj": None}})]
CHILDREN = {"epochs": 2, "target": "sparse", "parts": "children", "norms_and_biases": False}
RULES: dict[str, Any] = {
    "*.0.mlp.*": {"pattern": "1:4"},
    "*.k_proj": None,
    "*.up_proj": {"method": "ria"},
    "*.v_proj": {"method": NormPower(), "power": 0.5},
}

JOBS: dict[str, Job] = {
    # first of all those that fork
    "two processes: sparsegpt": partial(in_two, "llama", "sparsegpt"),
    "two processes: deterministic": partial(in_two, "llama", "sparsegpt", deterministic=True),
    "two processes: permute, polish, reconstruct": partial(
        in_two, "llama", "wanda", permute=True, polish=4, reconstruct=2
    ),
    "two processes: mixtral, memory_limit": partial(in_two, "mixtral", "sparsegpt", memory_limit=100_000),
    "two processes: t5, stage, deterministic": partial(
        in_two, "t5", "sparsegpt", sequential="stage", deterministic=True
    ),
    "two processes: allocation search": partial(in_two, "llama", "wanda", pattern=0.5, allocation="search"),
    # methods and patterns
    "magnitude": partial(sparse, "llama", "magnitude"),
    "wanda": partial(sparse, "llama", "wanda"),
    "ria": partial(sparse, "llama", "ria"),
    "sparsegpt": partial(sparse, "llama", "sparsegpt"),
    "alps": partial(sparse, "llama", "alps"),
    "own method with an option": partial(sparse, "llama", NormPower(), power=0.5),
    "own method that changes values": partial(sparse, "llama", Refit(), polish=2),
    "method's options": partial(sparse, "llama", "sparsegpt", config={"damping": 0.1, "block_size": 16}),
    "ModelOpt's mode list": partial(sparse, "llama", MODES, hessian_damp=0.02, max_iter_data_loader=2),
    "1:4, sparsegpt": partial(sparse, "llama", "sparsegpt", pattern="1:4"),
    "4:8, wanda": partial(sparse, "llama", "wanda", pattern="4:8"),
    "0.5, magnitude": partial(sparse, "llama", "magnitude", pattern=0.5),
    "0.5, alps": partial(sparse, "llama", "alps", pattern=0.5),
    "50% per row, ria": partial(sparse, "llama", "ria", pattern="50% per row"),
    "50% per row, sparsegpt": partial(sparse, "llama", "sparsegpt", pattern="50% per row"),
    # calibration
    "sequential stage": partial(sparse, "llama", "sparsegpt", sequential="stage"),
    "sequential none": partial(sparse, "llama", "sparsegpt", sequential="none"),
    "padding on the left": partial(sparse, "llama", "sparsegpt", data_loader=ragged("left")),
    "count_padding, max_batches": partial(
        sparse, "llama", "wanda", data_loader=ragged(), count_padding=True, max_batches=3
    ),
    "collect_func": partial(
        sparse, "llama", "wanda", data_loader=tokens(), collect_func=lambda x: {"input_ids": x[:, :7]}
    ),
    "forward_loop": partial(sparse, "llama", "sparsegpt", forward_loop=loop),
    "text": lambda: sparse("llama", "wanda", **{**text(), "data": "a few words of text. " * 99, "seq_len": 16}),
    "deterministic": partial(sparse, "llama", "sparsegpt", deterministic=True),
    "autocast": partial(sparse, "llama", "sparsegpt", autocast="bfloat16"),
    "bfloat16 model": partial(sparse, "llama", "sparsegpt", dtype=torch.bfloat16, polish=2, reconstruct=1),
    "float64 model": partial(sparse, "llama", "alps", dtype=torch.float64),
    # what follows a method
    "quality fast": partial(sparse, "llama", None, quality="fast"),
    "quality balanced": partial(sparse, "llama", None, quality="balanced"),
    "quality balanced, 0.5": partial(sparse, "llama", None, quality="balanced", pattern=0.5),
    "quality best": partial(sparse, "llama", None, quality="best"),
    "permute": partial(sparse, "llama", "sparsegpt", permute=True),
    "refine": partial(sparse, "llama", "wanda", refine=True),
    "polish": partial(sparse, "llama", "ria", polish=True),
    "update=False, refine": partial(sparse, "llama", "sparsegpt", update=False, refine=2),
    "update=False": partial(sparse, "llama", "alps", update=False),
    "reconstruct, dense": partial(sparse, "llama", "sparsegpt", reconstruct=True),
    "reconstruct, sparse, children": partial(sparse, "llama", "wanda", reconstruct=CHILDREN),
    "reconstruct, stage": partial(sparse, "gpt2", "wanda", reconstruct=2, sequential="stage"),
    "allocation block": partial(sparse, "llama", "sparsegpt", pattern=0.6, allocation="block"),
    "allocation owl": partial(sparse, "llama", "wanda", pattern="60%", allocation="owl"),
    "allocation search": partial(sparse, "llama", "wanda", pattern="60% per row", allocation="search"),
    "own masks": by_masks,
    "own masks, polish, reconstruct": partial(by_masks, polish=True, reconstruct=1),
    # which layers
    "rules": partial(sparse, "llama", "wanda", rules=RULES),
    "include, exclude": partial(sparse, "untied llama", "wanda", include=["*.1.*", "lm_head"], exclude="*.o_proj"),
    "hardware_only": partial(sparse, "cnn", "wanda", include="*", hardware_only=True),
    "enforce=False": partial(sparse, "llama", "sparsegpt", enforce=False),
    # other models
    "gpt2": partial(sparse, "gpt2", "sparsegpt"),
    "t5": partial(sparse, "t5", "sparsegpt", sequential="stage"),
    "t5, permute, reconstruct": partial(sparse, "t5", "alps", permute=True, reconstruct=1),
    "blocks called twice": partial(sparse, "albert", "sparsegpt"),
    "blocks called twice, permute, reconstruct": partial(sparse, "albert", "wanda", permute=True, reconstruct=1),
    "cnn with groups": partial(sparse, "cnn", "sparsegpt", include="*", pattern="1:4"),
    "cnn, alps, 0.5": partial(sparse, "cnn", "alps", include="*", pattern=0.5, polish=2),
    "TransformerEncoder": partial(sparse, "encoder", "sparsegpt"),
    "TransformerEncoder, reconstruct": partial(sparse, "encoder", "ria", reconstruct=1, permute=True),
    "no stack, tied layers": partial(sparse, "tied", "sparsegpt", include="*"),
    "mixtral, pool": partial(sparse, "mixtral", "sparsegpt", min_tokens=30),
    "mixtral, all_tokens": partial(sparse, "mixtral", "sparsegpt", experts="all_tokens"),
    "mixtral, weight_only": partial(sparse, "mixtral", "wanda", experts="weight_only", min_tokens=30),
    "mixtral, memory_limit": partial(sparse, "mixtral", "alps", memory_limit="100KB", min_tokens=30),
    "mixtral, polish, reconstruct": partial(sparse, "mixtral", "sparsegpt", polish=2, reconstruct=1, min_tokens=8),
    "gpt-oss": partial(sparse, "gpt-oss", "sparsegpt", min_tokens=8),
    "llama4": partial(sparse, "llama4", "sparsegpt", min_tokens=8),
    "jetmoe": partial(sparse, "jetmoe", "sparsegpt", min_tokens=8),
    "offloaded by accelerate": offloaded,
    "embedded model, sparsegpt": partial(testbed, "sparsegpt"),
    "embedded model, quality balanced": partial(testbed, None, quality="balanced", reconstruct=1),
    # the rest of the API
    "sparse twice": twice,
    "stopped in memory, then repeated": stopped_in_memory,
    "trained": trained,
    "save, load, restore, verify, export": partial(written, "llama"),
    "save, load, restore, verify, export: mixtral": partial(written, "mixtral"),
    "save, restore, export: tied layers": partial(written, "tied", include="*"),
    "masks set by hand": set_by_hand,
    "plans of models without values": plans,
    "what is refused": refused,
    # streaming
    "stream": partial(stream, "llama", "sparsegpt"),
    "stream, spill": partial(stream, "llama", "wanda", data_loader=ragged(), spill=True),
    "stream, sequential none": partial(stream, "gpt2", "sparsegpt", sequential="none"),
    "stream, permute, reconstruct": partial(stream, "llama", "alps", permute=True, reconstruct=1, spill=True),
    "stream, bfloat16": partial(stream, "llama", "sparsegpt", dtype=torch.bfloat16),
    "stream, t5": partial(stream, "t5", "sparsegpt"),
    "stream, mixtral": partial(stream, "mixtral", "sparsegpt", min_tokens=30),
    "stream, stopped and resumed": stopped_stream,
    "stream, stopped and resumed, permute, reconstruct": partial(
        stopped_stream, permute=True, reconstruct={"target": "sparse"}
    ),
    # the command line
    "command line: sparsify": partial(commands, f"{SPARSIFY} --method sparsegpt --eval text.txt --json"),
    "command line: sparsify, options": partial(commands, f"{SPARSIFY} --quality fast --set pattern=4:8"),
    "command line: sparsify --stream": partial(commands, f"{SPARSIFY} --method wanda --stream --spill"),
    "command line: plan": partial(commands, f"plan dense {SAMPLES}", "plan dense --pattern 50% --json"),
    "command line: verify": partial(commands, MAGNITUDE, "verify sparse", "verify sparse --pattern 1:4 --json"),
    "command line: report": partial(commands, MAGNITUDE, "report sparse", "report sparse --json"),
    "command line: eval": partial(
        commands, MAGNITUDE, "eval sparse --data text.txt --seq-len 32 --reference dense --no-progress"
    ),
    "command line: wrong input": partial(commands, "plan nowhere", "sparsify dense --out sparse", "plan dense --set x"),
}
ACROSS = "stream, stopped by the other checkout, goes on here"


# one side -------------------------------------------------------------------------------------------------------------


def run_jobs(checkout: Path, results: Path, only: str) -> None:
    """Run all jobs with the checkout that is in the path of this process."""
    file = Path(mts.__file__).resolve()
    if not file.is_relative_to(checkout):
        raise SystemExit(f"{file} is not in {checkout}")
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    jobs = {**JOBS, ACROSS: partial(across, results.parent / "shared")}
    done: Result = {}
    for name, job in jobs.items():
        if only not in name:
            continue
        folder = results.with_suffix("") / str(len(done))
        folder.mkdir(parents=True)
        os.chdir(folder)
        print(name, end="", flush=True)
        began = time.monotonic()
        try:
            done[name] = job()
        except Exception:
            done[name] = {"fails": traceback.format_exc()}
        print(f": {time.monotonic() - began:.1f} s", flush=True)
    results.write_text(json.dumps(done, default=str), encoding="utf-8")


if __name__ == "__main__":
    run_jobs(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
