"""Runs the same small jobs with two checkouts of this package, and says which of them end with other bits.

    python tests/same_bits.py OTHER_CHECKOUT [--this CHECKOUT] [--only SUBSTRING] [--out FILE]

It is for changes that must not change what is computed. Make a worktree of the version before the change, and give its
folder as OTHER_CHECKOUT. Each checkout runs all jobs in one process of its own, through the public API and the command
line alone. Compared are the bits of all tensors and masks, reports and plans, files, and what commands print. Times and
versions are left out. Exit code 1 says that a job differs or fails, 2 that a process did not come to its end.

Both sides have one thread. Both set torch's precision of float32 products, so that the library times none of them.
"""

import argparse
import hashlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as hf
from torch import Tensor, nn

Result = dict[str, Any]
mts: Any = None  # the package, as the checkout has it whose jobs this process runs; `run_jobs` imports it

TESTBED = Path(__file__).resolve().parent.parent / "examples" / "testbed"
# as tables and first lines print seconds
TIMES = re.compile(r"(?<![\d.=])\d+\.\d\d(?:\.\.\d+\.\d\d)?(?![\d%])|\d+\.\d(?= s of )")
NOT_COMPARED = ("seconds", "versions", "checksum")  # a checksum is of a whole file, its times and versions included
SHOWN, LIMIT = 2, 900  # differences that the table spells out; seconds that a side may take

# models and their data ------------------------------------------------------------------------------------------------

VOCAB, WIDTH, INNER = 97, 32, 64
WIDTHS = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"vocab_size": VOCAB, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "max_position_embeddings": 64}
SIZES: dict[str, Any] = {**WIDTHS, **IDS, "num_hidden_layers": 2}
EXPERTS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {**SIZES, "num_local_experts": 4, "intermediate_size_mlp": INNER, "head_dim": 8, "attention_chunk_size": 16}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "eos_token_id": 2}
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": INNER, "num_layers": 2, "num_heads": 4}


def transformer(name: str, config: str, settings: Mapping[str, Any], **more: Any) -> Any:
    return getattr(hf, name)(getattr(hf, config)(**{**settings, **more}))


def cnn() -> nn.Module:
    convolutions = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=4), nn.ReLU())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 16))


def tokens(vocab: int = VOCAB) -> list[Tensor]:
    return list(torch.randint(3, vocab, (4, 2, 12), generator=torch.Generator().manual_seed(1)))


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


def images() -> list[Tensor]:
    return list(torch.randn(3, 4, 3, 12, 12, generator=torch.Generator().manual_seed(1)))


def sequences() -> list[dict[str, Tensor]]:
    padding = [batch["attention_mask"] == 0 for batch in ragged()]
    generator = torch.Generator().manual_seed(1)
    return [{"src": torch.randn(*x.shape, WIDTH, generator=generator), "src_key_padding_mask": x} for x in padding]


def text() -> Result:
    words = (TESTBED / "calibration.txt").read_text(encoding="utf-8")[:20_000]
    tokenizer = hf.AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    return {"data": [words], "tokenizer": tokenizer, "num_samples": 8, "seq_len": 32, "batch_size": 2}


llama = partial(transformer, "LlamaForCausalLM", "LlamaConfig", SIZES, tie_word_embeddings=True)
layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, INNER, batch_first=True)
embedded = partial(hf.LlamaForCausalLM.from_pretrained, TESTBED / "tiny-llama", dtype="float32")
# name -> how the model is made, and its calibration data: batches, or options
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "llama": (llama, tokens),
    "padded": (llama, ragged),
    "left-padded": (llama, partial(ragged, "left")),
    "text": (partial(llama, vocab_size=2048), text),
    "deep": (partial(llama, num_hidden_layers=3), tokens),
    "untied": (partial(llama, vocab_size=96, tie_word_embeddings=False), partial(tokens, 96)),
    "embedded": (embedded, text),
    "gpt2": (partial(transformer, "GPT2LMHeadModel", "GPT2Config", GPT2), ragged),
    "t5": (partial(transformer, "T5ForConditionalGeneration", "T5Config", T5), pairs),
    "albert": (partial(transformer, "AlbertForMaskedLM", "AlbertConfig", SIZES, embedding_size=16), ragged),
    "mixtral": (partial(transformer, "MixtralForCausalLM", "MixtralConfig", EXPERTS), ragged),
    "gpt-oss": (partial(transformer, "GptOssForCausalLM", "GptOssConfig", EXPERTS, head_dim=8), ragged),
    "llama4": (partial(transformer, "Llama4ForCausalLM", "Llama4TextConfig", LLAMA4), ragged),
    "jetmoe": (partial(transformer, "JetMoeForCausalLM", "JetMoeConfig", EXPERTS, kv_channels=8), ragged),
    "cnn": (cnn, images),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2), sequences),
    "no-stack": (layer, sequences),
}


def built(name: str) -> Any:
    """The model in evaluation mode, with weights of a size that lets every layer matter."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters() if name != "embedded" else ():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def with_data(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    data = {} if {"data_loader", "forward_loop"} & options.keys() else MODELS[name][1]()
    return {"progress": False, **(data if isinstance(data, dict) else {"data_loader": data}), **options}


def own_method(at: int = 0) -> Any:
    """A method of a user's own, with an option. It can be interrupted once, when it is given its ``at``-th layer."""

    class NormPower(mts.Method):
        name = "norm_power"
        needs = "square_sums"
        options = {"power": 1.0}
        calls = 0

        def solve(self, weight, state, pattern, options):
            self.calls += 1
            if self.calls == at:
                raise KeyboardInterrupt
            norms = state.square_sums.sqrt().unsqueeze(-2)
            score = weight.abs().to(norms.dtype) * norms ** options["power"]
            return mts.masked_solution(weight, pattern.mask(score), state)

    return NormPower()


# what is compared -----------------------------------------------------------------------------------------------------


def digest(values: Tensor) -> str:
    data = values.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{values.dtype} {list(values.shape)} {hashlib.sha256(data).hexdigest()}"


def without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): without_times(each) for key, each in value.items() if key not in NOT_COMPARED}
    return [without_times(each) for each in value] if isinstance(value, (list, tuple)) else value


def result_of(model: nn.Module) -> Result:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {name: digest(values) for name, values in named},
        "masks": {name: digest(mask) for name, mask in mts.named_masks(model)},
        "report": without_times(mts.report(model).as_dict()),
        "verified": str(mts.verify(model)),
    }


def files_in(folder: Path) -> Result:
    """Hashes of all files; sparsity.json, which holds times, as what it says."""
    files = {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}
    texts = {name: without_times(json.loads(data)) for name, data in files.items() if name.endswith("sparsity.json")}
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} | texts


# jobs -----------------------------------------------------------------------------------------------------------------


def sparse(name: str, method: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Result:
    model, options = built(name).to(dtype), with_data(name, options)
    plan = mts.make_plan(model, method, **options)
    mts.sparsify(model, method, **options)
    return {"printed plan": str(plan), "plan": plan.as_dict(), **result_of(model)}


def two(name: str, method: Any, **options: Any) -> Result:
    """Two processes, forked from this one: these jobs come first, before a gradient has been taken here."""
    mp.start_processes(one_of_two, (name, method, options), nprocs=2, start_method="fork")
    return {f"rank {rank}": json.loads(Path(f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)}


def one_of_two(rank: int, name: str, method: Any, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
    Path(f"{rank}.json").write_text(json.dumps(sparse(name, method, **options), default=str), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def stream(name: str, method: Any, **options: Any) -> Result:
    built(name).save_pretrained("dense")
    report = mts.sparsify_checkpoint("dense", "sparse", method, **with_data(name, options))
    return {"report": without_times(report.as_dict()), "files": files_in(Path()), "verified": str(mts.verify("sparse"))}


def written(name: str, method: Any, **options: Any) -> Result:
    """Saved, restored into a new model, loaded if it is transformers', and exported."""
    model = mts.sparsify(built(name), method, **with_data(name, options))
    mts.save(model, "sparse")
    results = {"files": files_in(Path()), "restored": result_of(mts.restore(built(name), "sparse"))}
    if Path("sparse/config.json").exists():
        results |= {"loaded": result_of(mts.load("sparse")), "verified": str(mts.verify("sparse"))}
    return {**results, "exported": result_of(mts.export(model))}


def masked(**options: Any) -> Result:
    layers = {f"{name}.weight": x.weight for name, x in built("llama").named_modules() if name.endswith("_proj")}
    masks = {name: x.abs() > x.abs().median(1, keepdim=True).values for name, x in layers.items()}
    return sparse("llama", None, masks=masks, pattern=0.5, **options)


def twice() -> Result:
    model = mts.sparsify(built("llama"), "magnitude", pattern="1:4", exclude="*.down_proj", progress=False)
    return result_of(mts.sparsify(model, "wanda", include="*.1.mlp.*", **with_data("llama", {})))


def begin(folder: Path, method: Any, **options: Any) -> None:
    """A streamed run is stopped when one of three blocks is done, and the second one is begun."""
    built("deep").save_pretrained(folder / "dense")
    with suppress(KeyboardInterrupt):
        mts.sparsify_checkpoint(folder / "dense", folder / "sparse", method, **with_data("deep", options))


def go_on(folder: Path, method: Any, **options: Any) -> Result:
    """The folder must be that of a run that nobody has disturbed, but for what the notes say."""
    mts.sparsify_checkpoint(folder / "dense", folder / "sparse", method, **with_data("deep", options))
    mts.sparsify_checkpoint(folder / "dense", folder / "fresh", own_method(), **with_data("deep", options))
    resumed, fresh = files_in(folder / "sparse"), files_in(folder / "fresh")
    notes = [files["sparsity.json"]["report"].pop("notes") for files in (resumed, fresh)]
    assert notes[0][-1:] == ["1 of 3 blocks were reused from a stopped run"], notes
    assert not differences(fresh, resumed), f"not the undisturbed folder: {differences(fresh, resumed)}"
    return {"files": resumed, "notes": notes, "layers solved": method.calls}


def stopped(**options: Any) -> Result:
    method = own_method(at=10)
    begin(Path(), method, **options)
    return go_on(Path(), method, **options)


def across(shared: Path) -> Result:
    """The side that comes first begins a run and is stopped, the other one goes on with it, or refuses to."""
    if not (shared / "dense").exists():
        begin(shared, own_method(at=10))
        return {"outcome": "began"}
    try:
        go_on(shared, own_method())
    except ValueError as error:
        if "started with something else" not in str(error):
            raise
        return {"outcome": f"refused, with what differs: {error}"}
    return {"outcome": "goes on, to the folder of a run that nobody has disturbed"}


def commands(*lines: str) -> Result:
    """What `python -m modelopt_sparse` prints, in this process, and its exit codes; the model has a tokenizer."""
    built("text").save_pretrained("dense")
    text()["tokenizer"].save_pretrained("dense")
    Path("text.txt").write_text(text()["data"][0][:5_000], encoding="utf-8")
    results: Result = {}
    for line in lines:
        sys.argv, out, err, code = ["modelopt_sparse", *line.split()], io.StringIO(), io.StringIO(), None
        try:
            with redirect_stdout(out), redirect_stderr(err):
                runpy.run_module("modelopt_sparse", run_name="__main__")
        except SystemExit as done:
            code = done.code
        rows = [re.sub("[ -]+", " ", TIMES.sub("#", row)) for row in out.getvalue().splitlines()]
        printed = without_times(json.loads(out.getvalue())) if "--json" in line else rows
        complaints = [row for row in err.getvalue().splitlines() if row.startswith("modelopt-sparse:")]
        results[line] = {"code": code, "printed": printed, "complaints": complaints}
    return {**results, "files": files_in(Path())}


# the list -------------------------------------------------------------------------------------------------------------

# how, with which model: method and options; the next job of the same kind
LINES = """
two llama: sparsegpt; sparsegpt deterministic=true; wanda permute=true polish=4 reconstruct=2
two llama: wanda pattern=0.5 allocation=search; alps reconstruct=1 deterministic=true
two mixtral: sparsegpt memory_limit=400KB; sparsegpt deterministic=true
two t5: sparsegpt sequential=stage deterministic=true
sparse llama: magnitude; wanda; ria; sparsegpt; alps; OWN power=0.5; sparsegpt damping=0.1 block_size=16
sparse llama: MODES hessian_damp=0.02 max_iter_data_loader=2; OWN power=2 polish=2 reconstruct=1
sparse llama: sparsegpt pattern=1:4; wanda pattern=4:8; magnitude pattern=0.5; alps pattern=0.5
sparse llama: ria pattern="50% per row"; sparsegpt pattern="50% per row"
sparse llama: sparsegpt sequential=stage; sparsegpt sequential=none; alps sequential=none pattern=1:4
sparse padded: sparsegpt; wanda count_padding=true max_batches=3; alps reconstruct=1 permute=true
sparse left-padded: sparsegpt
sparse text: wanda; sparsegpt seed=3 num_samples=5
sparse llama: sparsegpt forward_loop=LOOP; wanda collect_func=SHORT data_loader=TOKENS; sparsegpt device=cpu
sparse llama: sparsegpt deterministic=true; sparsegpt autocast=bfloat16; alps dtype=FLOAT64
sparse llama: sparsegpt dtype=BFLOAT16 polish=2 reconstruct=1; wanda quality=balanced sequential=stage
sparse llama: DEFAULT quality=fast; DEFAULT quality=balanced; DEFAULT quality=balanced pattern=0.5
sparse llama: DEFAULT quality=best; sparsegpt permute=true; wanda refine=true; ria polish=true; alps update=false
sparse llama: sparsegpt update=false refine=2; sparsegpt reconstruct=true; wanda reconstruct=CHILDREN
sparse llama: sparsegpt pattern=0.6 allocation=block; wanda pattern=60% allocation=owl
sparse llama: wanda pattern="60% per row" allocation=search; wanda rules=RULES; sparsegpt enforce=false
sparse untied: wanda include='["*.1.*", "lm_head"]' exclude=*.o_proj
sparse gpt2: sparsegpt; wanda reconstruct=2 sequential=stage
sparse t5: sparsegpt sequential=stage; alps permute=true reconstruct=1
sparse albert: sparsegpt; wanda permute=true reconstruct=1
sparse cnn: sparsegpt include=* pattern=1:4; alps include=* pattern=0.5 polish=2; wanda include=* hardware_only=true
sparse encoder: sparsegpt; ria permute=true reconstruct=1
sparse no-stack: sparsegpt include=*
sparse mixtral: sparsegpt min_tokens=30; sparsegpt experts=all_tokens; wanda experts=weight_only min_tokens=30
sparse mixtral: sparsegpt memory_limit=400KB min_tokens=30; sparsegpt polish=2 reconstruct=1 min_tokens=8
sparse gpt-oss: sparsegpt min_tokens=8
sparse llama4: sparsegpt min_tokens=8
sparse jetmoe: sparsegpt min_tokens=8
sparse embedded: sparsegpt; wanda permute=true reconstruct=1
written llama: wanda; sparsegpt pattern=0.5
written mixtral: magnitude
written encoder: sparsegpt
stream llama: sparsegpt; alps permute=true reconstruct=1 spill=true; sparsegpt dtype=BFLOAT16; magnitude
stream padded: wanda spill=true; DEFAULT quality=balanced
stream gpt2: sparsegpt sequential=none
stream t5: sparsegpt; wanda reconstruct=1
stream mixtral: sparsegpt min_tokens=30; wanda spill=true sequential=stage
"""
CALIBRATED = "sparsify dense --out sparse --data text.txt --seq-len 32"
MAGNITUDE = "sparsify dense --out sparse --method magnitude"
READING = ("report sparse", "report sparse --json", "verify sparse", "verify sparse --pattern 1:4 --json")
ACROSS = "stopped stream, begun by the other checkout"
OTHERS: dict[str, Callable[[], Result]] = {
    "own masks": masked,
    "own masks, polish, reconstruct": partial(masked, polish=True, reconstruct=1),
    "sparse twice": twice,
    "stopped stream": stopped,
    "stopped stream, permute, reconstruct": partial(stopped, permute=True, reconstruct={"target": "sparse"}),
    "commands: sparsify": partial(commands, f"{CALIBRATED} --method wanda --eval text.txt --json"),
    "commands: sparsify --stream": partial(commands, f"{CALIBRATED} --quality fast --stream --spill --set pattern=4:8"),
    "commands: plan": partial(commands, "plan dense --data text.txt", "plan dense --pattern 50% --json"),
    "commands: report, verify": partial(commands, MAGNITUDE, *READING),
    "commands: eval": partial(commands, MAGNITUDE, "eval sparse --data text.txt --reference dense --seq-len 32"),
    "commands: wrong input": partial(commands, "sparsify dense --out sparse", "plan dense --set x"),
}


def value_of(word: str) -> Any:
    """What a word of the list stands for: capitals for what is below, else JSON, or the word itself."""
    rules = {"*.0.mlp.*": {"pattern": "1:4"}, "*.k_proj": None, "*.v_proj": {"method": own_method(), "power": 0.5}}
    values = {
        "DEFAULT": None,
        "BFLOAT16": torch.bfloat16,
        "FLOAT64": torch.float64,
        "OWN": own_method(),
        "MODES": [("sparsegpt", {"nn.Linear": {"*": {}, "*.k_proj": None}})],  # ModelOpt's
        "CHILDREN": {"epochs": 2, "target": "sparse", "parts": "children", "norms_and_biases": False},
        "RULES": rules,
        "TOKENS": tokens(),
        "SHORT": lambda batch: {"input_ids": batch[:, :7]},
        "LOOP": lambda model: [model(batch) for batch in tokens()],
    }
    try:
        return values[word] if word in values else json.loads(word)
    except ValueError:
        return word


def jobs_of(lines: str) -> Iterator[tuple[str, Callable[[], Result]]]:
    for line in lines.strip().splitlines():
        head, _, rest = line.partition(": ")
        how, model = head.split()
        for job in rest.split("; "):
            method, *options = shlex.split(job)
            named = {key: value_of(value) for key, _, value in (option.partition("=") for option in options)}
            run: Any = {"two": two, "sparse": sparse, "written": written, "stream": stream}[how]
            yield f"{head}: {job}", partial(run, model, value_of(method), **named)


# the two sides --------------------------------------------------------------------------------------------------------


def run_jobs(checkout: Path, results: Path, only: str) -> None:
    """Run the jobs with the checkout that is in the path of this process, each in an empty folder."""
    global mts
    import modelopt_sparse as mts

    if not Path(mts.__file__).resolve().is_relative_to(checkout):
        raise SystemExit(f"{mts.__file__} is not in {checkout}")
    torch.set_num_threads(1)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    jobs = {**dict(jobs_of(LINES)), **OTHERS, ACROSS: partial(across, results.parent / "shared")}
    done: Result = {}
    for name in [name for name in jobs if only in name]:
        folder = results.with_suffix("") / str(len(done))
        folder.mkdir(parents=True)
        os.chdir(folder)
        began = time.monotonic()
        try:
            done[name] = jobs[name]()
        except Exception:
            done[name] = {"fails": traceback.format_exc()}
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    results.write_text(json.dumps(done, default=str), encoding="utf-8")
    print(f"{len(done)} jobs with {mts.__file__}")


def start(checkout: Path, results: Path, only: str) -> Result:
    """One side, in a process of its own."""
    arguments = [sys.executable, __file__, str(checkout), "--results", str(results), "--only", only]
    fixed = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    done = subprocess.run(arguments, env={**os.environ, **fixed}, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(2)
    print(f"{done.stdout.splitlines()[-1]} in {time.monotonic() - began:.0f} s", flush=True)
    return json.loads(results.read_text(encoding="utf-8"))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(each, f"{path} > {key}".removeprefix(" > "))
    yield path, f"{type(value).__name__} of {len(value)}" if isinstance(value, (dict, list)) else repr(value)


def differences(other: Any, this: Any) -> list[str]:
    there, here = dict(flat(other)), dict(flat(this))
    differing = [path for path in {**there, **here} if there.get(path) != here.get(path)]
    return [f"{path}: {there.get(path, 'nothing')} there, {here.get(path, 'nothing')} here" for path in differing]


def problems_of(name: str, other: Result, this: Result) -> list[str]:
    failed = [f"fails {where}: {x['fails']}" for where, x in (("there", other), ("here", this)) if "fails" in x]
    return failed or ([] if name == ACROSS else differences(other, this))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--this", type=Path, default=TESTBED.parents[1], help="default: the one this file lies in")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="jobs with this in their names")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, with all that differs")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # this process is one of the sides
    chosen = parser.parse_args()
    if chosen.results is not None:
        return run_jobs(chosen.other, chosen.results, chosen.only)
    with tempfile.TemporaryDirectory() as folder:
        other = start(chosen.other.resolve(), Path(folder).resolve() / "other.json", chosen.only)
        this = start(chosen.this.resolve(), Path(folder).resolve() / "this.json", chosen.only)
    wrong = {name: problems_of(name, result, this[name]) for name, result in other.items()}
    if not wrong:
        parser.error(f"no job has {chosen.only!r} in its name")
    short, long, width = [], [], max(map(len, wrong))
    for name, problems in wrong.items():
        same = this[name]["outcome"] if name == ACROSS and not problems else "same"
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        lines = [" ".join(problem.split()) for problem in problems[:SHOWN]]
        shown = [line if len(line) < 240 else f"{line[:120]} ... {line[-120:]}" for line in lines]
        short.append(f"{name:{width}}  {'; '.join([*shown, *more]) or same}")
        long.append(f"{name:{width}}  {'; '.join(problems) or same}")
    ending = f"{sum(not problems for problems in wrong.values())} of {len(wrong)} jobs are the same"
    print("\n".join([*short, ending]))
    if chosen.out is not None:
        chosen.out.write_text("\n".join([*long, ending, ""]), encoding="utf-8")
    raise SystemExit(any(wrong.values()))


if __name__ == "__main__":
    main()
