"""The command line: `modelopt-sparse sparsify | plan | eval | verify | report | speed | sparse-ift | finalize`.

Thin over the public API.
"""

import json
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from safetensors import SafetensorError
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.calibration.data import read_documents, tokenize
from modelopt_sparse.checkpoint.place import checked_place
from modelopt_sparse.checkpoint.streaming.workfolder import reserved
from modelopt_sparse.checkpoint.verify import PatternError
from modelopt_sparse.cli.inputs import DTYPES, NamedModel, settings_of
from modelopt_sparse.distributed import RankError, launched_group, rank, while_others_wait
from modelopt_sparse.methods import METHODS
from modelopt_sparse.model.hf import default_seq_len
from modelopt_sparse.plan.quality import QUALITIES
from modelopt_sparse.training.iso_flop.recipe import sparse_ift_files
from modelopt_sparse.training.iso_flop.transform import MEMBERS

HELP = """Make PyTorch and Hugging Face language models sparse, and see what that cost.

Exit codes: 0 done; 1 verify found layers that break their pattern; 2 wrong arguments or input; 3 another process of the
run stopped or died (torchrun); 130 Ctrl-C.
"""
VIOLATION, WRONG_INPUT, RANK_LOST, INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    help=HELP, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder or a hub name.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that sparsify wrote.")]
Dtype = Annotated[str, typer.Option(help=f"Weights' dtype: {', '.join(DTYPES)} (auto: as stored).")]
Revision = Annotated[str | None, typer.Option(help="Hub revision.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]
Device = Annotated[str | None, typer.Option(help="Where to run, for example cuda. Default: the CPU.")]
AllRows = Annotated[bool, typer.Option("--all", help="A line for each layer; else equal ones are folded.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings and errors, unless --json.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
Method = Annotated[
    str | None, typer.Option(help=f"{', '.join(METHODS)}. Default: sparsegpt, or what --quality chooses.")
]
Quality = Annotated[
    str | None, typer.Option(help=f"{', '.join(QUALITIES)}: chooses the method and what follows it. Default: neither.")
]
Pattern = Annotated[
    str | None, typer.Option(help="2:4, any N:M (N kept), or a pruned fraction such as 50%. Default: 2:4.")
]
Data = Annotated[Path | None, typer.Option(help="Calibration text: a .txt file, or .jsonl with a text key.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of any options of the API; --set and flags win over it.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any option of the API or of the method; VALUE is YAML."),
]
Include = Annotated[list[str] | None, typer.Option(help="Glob of layers to prune; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Glob of layers to leave dense; may be repeated.")]
Samples = Annotated[int | None, typer.Option(help="Calibration windows. Default: 128.")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens per window. Default: 2048, or the model's maximum.")]
BatchSize = Annotated[
    int | None, typer.Option(help="Windows per batch. Default: about 2048 tokens on the CPU, else 8.")
]
Sequential = Annotated[
    str | None,
    typer.Option(help="What is sparse before a layer when it is calibrated: block, stage or none. Default: block."),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the choice of windows. Default: 0.")]
Dequantize = Annotated[
    bool, typer.Option("--dequantize", help="MODEL is quantized (fp8, mxfp4): make weights of its codes, in --dtype.")
]
Deterministic = Annotated[
    bool | None, typer.Option("--deterministic", help="Any number of processes gives the bits of one.")
]
Progress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="Default: one bar, on a terminal. --progress: every library's bars."),
]


@app.command()
def sparsify(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    method: Method = None,
    quality: Quality = None,
    pattern: Pattern = None,
    data: Data = None,
    num_samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    include: Include = None,
    exclude: Exclude = None,
    sequential: Sequential = None,
    seed: Seed = None,
    deterministic: Deterministic = None,
    config: ConfigFile = None,
    options: Options = None,
    eval_data: Annotated[
        Path | None, typer.Option("--eval", help="Held-out text: perplexity of dense and sparse on it, and KL.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    dequantize: Dequantize = False,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Never hold the whole model; started again, go on where it was stopped.")
    ] = False,
    spill: Annotated[
        bool, typer.Option("--spill", help="With --stream: hold activations in files beside the output folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model in a folder that is not empty.")
    ] = False,
    progress: Progress = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make MODEL sparse and write a folder. Plain transformers loads it. Processes of torchrun share the work."""
    settings = settings_of(locals(), config, options)
    if rank() > 0 or (quiet and progress is None):
        progress = settings["progress"] = False
    if stream and eval_data is not None:
        raise ValueError(
            "--eval holds the whole model, which --stream never does: leave it out, and use eval afterwards"
        )
    if spill and not stream:
        raise ValueError("--spill goes with --stream")
    if not stream:  # a streaming run may continue an earlier one, and looks by itself
        checked_place(out, overwrite=overwrite, sources=[model])
    source = NamedModel(model, dtype, revision, trust_remote_code, progress)
    method = settings.pop("method")
    tokenizer = source.tokenizer() if "data" in settings or eval_data is not None else None
    if "data" in settings:
        settings["tokenizer"] = tokenizer
    held_out = None if eval_data is None else tokenize(tokenizer, read_documents(eval_data))
    empty, quantized = source.empty(dequantize, read=True)
    planned = mts.make_plan(empty, method, settings)  # what is wrong is found here, before weights are read
    if "data" not in settings and (needing := [layer for layer in planned.layers if layer.calibrated]):
        raise ValueError(f"method {needing[0].recipe!r} needs calibration text: give --data FILE")

    evaluation = None
    if stream:
        more = {"overwrite": overwrite, "spill": spill, "dtype": dtype, "dequantize": dequantize, **source.hub}
        sparsity_report = mts.sparsify_checkpoint(model, out, method, settings, **more)
    else:
        with reserved(out) if rank() == 0 else nullcontext():
            companions = source.companions()
            dense = source.load(quantized=quantized, masks=not settings.get("replace"))
            network = mts.sparsify(dense, method, settings)
            if quantized is not None:
                mts.report(network).notes.append(str(quantized))
            with while_others_wait(settings.get("distributed")) as writes:
                if not writes:
                    return
                if held_out is not None:
                    place = settings.get("device") or "cpu"
                    evaluation = _evaluate(network.to(place), source.load(place, quantized), held_out, settings)
                mts.save(network.to("cpu"), out, overwrite=overwrite, companions=companions)
        sparsity_report = mts.report(network)
    if as_json:
        _print_json(
            {"out": str(out), "evaluation": evaluation and evaluation.as_dict(), "report": sparsity_report.as_dict()}
        )
        return
    if quiet:
        return
    typer.echo(sparsity_report)
    if evaluation is not None:
        typer.echo(
            f"\nheld-out perplexity: dense {evaluation.reference_perplexity:.3f}, sparse {evaluation.perplexity:.3f}; "
            f"KL from dense {evaluation.kl:.4f} nats per token; {evaluation.windows} windows of "
            f"{evaluation.seq_len} tokens"
        )
    typer.echo(
        f"\nWritten to {out}: load it with transformers, or with modelopt_sparse.load to keep it sparse in training."
    )


@app.command()
def plan(
    model: Model,
    method: Method = None,
    quality: Quality = None,
    pattern: Pattern = None,
    data: Data = None,
    num_samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    include: Include = None,
    exclude: Exclude = None,
    sequential: Sequential = None,
    seed: Seed = None,
    deterministic: Deterministic = None,
    config: ConfigFile = None,
    options: Options = None,
    training_recipe: Annotated[
        Path | None,
        typer.Option("--training", help="YAML with a section sparsity: show what would be trained sparse instead."),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    dequantize: Dequantize = False,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    all_rows: AllRows = False,
    as_json: Json = False,
) -> None:
    """Show what sparsify would do to MODEL, or training. Says why the rest stays dense. Reads no weights."""
    arguments = {key: value for key, value in locals().items() if key != "training_recipe"}
    settings = settings_of(arguments, config, options, check_device=False)  # the device may be another machine's
    source = NamedModel(model, dtype, revision, trust_remote_code)
    if training_recipe is not None:
        if extra := [key for key, value in settings.items() if value is not None]:
            raise ValueError(f"--training shows a recipe of its own: leave {', '.join(sorted(extra))} out")
        empty, _ = source.empty(dequantize)
        training_plan = training.configure(training_recipe).plan(empty)
        typer.echo(training_plan.to_json() if as_json else training_plan.text(all_rows=all_rows))
        return
    if "data" in settings:
        settings["tokenizer"] = source.tokenizer()
    empty, quantized = source.empty(dequantize)
    planned = mts.make_plan(empty, settings.pop("method"), settings)
    if quantized is not None:
        planned = replace(planned, notes=(*planned.notes, str(quantized)))
    typer.echo(planned.to_json() if as_json else planned.text(all_rows=all_rows))


@app.command(name="eval")
def eval_(
    model: Model,
    data: Annotated[Path, typer.Option(help="Held-out text: a .txt file, or .jsonl with a text key.")],
    reference: Annotated[str | None, typer.Option(help="The dense model: its perplexity, and the KL from it.")] = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    progress: Progress = None,
    as_json: Json = False,
) -> None:
    """Measure MODEL's perplexity on text. With --reference also the dense model's, and the KL divergence from it."""
    settings = settings_of({"seq_len": seq_len, "batch_size": batch_size, "device": device, "progress": progress})
    source = NamedModel(model, dtype, revision, trust_remote_code, progress)
    beside = None if reference is None else NamedModel(reference, dtype, None, trust_remote_code, progress)
    tokens = tokenize(source.tokenizer(), read_documents(data))
    place = device or "cpu"
    evaluation = _evaluate(source.load(place), None if beside is None else beside.load(place), tokens, settings)
    if as_json:
        _print_json(evaluation.as_dict())
    else:
        typer.echo(evaluation)


@app.command()
def verify(
    folder: Folder,
    pattern: Annotated[str | None, typer.Option(help="Pattern asked of every pruned layer.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    all_rows: AllRows = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check the weights in DIR for a pattern. Default: the one in their report. Exit code 1 if they break it."""
    violation = None
    try:
        verification = mts.verify(folder, pattern, trust_remote_code=trust_remote_code)
    except PatternError as error:
        verification, violation = error.verification, error
    if as_json:
        _print_json([vars(layer) for layer in verification.layers])
    elif not quiet:
        typer.echo(verification.text(all_rows=all_rows))
    if violation is not None:
        _complain(violation)
        raise typer.Exit(VIOLATION)


@app.command()
def report(folder: Folder, all_rows: AllRows = False, as_json: Json = False) -> None:
    """Show what was done to the model in DIR. Per layer: recipe, pattern, zeros, error and time."""
    sparsity_report = mts.report(folder)
    typer.echo(sparsity_report.to_json() if as_json else sparsity_report.text(all_rows=all_rows))


@app.command()
def speed(
    folder: Folder,
    tokens: Annotated[str, typer.Option(help="Token counts that matter, for example 1,64,2048.")],
    timing: Annotated[str, typer.Option(help="eager: as called from Python. graph: as in a CUDA graph.")] = "eager",
    quantize: Annotated[
        str | None, typer.Option(help="fp8 or int8: 2:4 in 8 bits. Default: the weights' dtype.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="JSON file that timings are kept in.")] = None,
    device: Annotated[str, typer.Option(help="The CUDA device to time on.")] = "cuda",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Time the layers in DIR, dense against 2:4, on this GPU. Shows which would run 2:4, and why others stay dense."""
    if wrong := [count for count in tokens.split(",") if not count.strip().isdecimal()]:
        raise ValueError(f"--tokens {tokens}: {wrong[0]!r} is no number of tokens; write for example 1,64,2048")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: allowed are {', '.join(DTYPES)}")
    options = {"tune": tuple(map(int, tokens.split(","))), "timing": timing, "quantize": quantize, "cache": cache}
    dtype_option = {} if DTYPES[dtype] is None else {"dtype": DTYPES[dtype]}
    model = mts.load(
        folder, semi_structured=options, device_map=device, trust_remote_code=trust_remote_code, **dtype_option
    )
    speed_report = mts.semi_structured_report(model)
    typer.echo(speed_report.to_json() if as_json else speed_report)


@app.command()
def sparse_ift(
    model: Model,
    sparsity: Annotated[float, typer.Option(help="The level, in [0, 1): says how much larger layers become.")],
    out: Annotated[Path, typer.Option(help="Folder to write: config.json and recipe.yaml.")],
    member: Annotated[str, typer.Option(help=f"{', '.join(MEMBERS)}.")] = "wide",
    iso: Annotated[str, typer.Option(help="layers or model: whose FLOPs stay (model: wide alone).")] = "layers",
    multiple: Annotated[int, typer.Option(help="Widths are rounded up to a multiple of this.")] = 1,
    include: Annotated[list[str] | None, typer.Option(help="Glob of layers to replace; may be repeated.")] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="YAML with a section sparsity, without a level: how it is trained. Else: static."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write to a folder that is not empty.")] = False,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    all_rows: AllRows = False,
    as_json: Json = False,
) -> None:
    """Write config and recipe of a larger, sparser MODEL of the same FLOPs."""
    section = {"sparsity": sparsity, "member": member, "iso": iso, "multiple": multiple, "include": include}
    place = checked_place(out, overwrite=overwrite, sources=[model])
    empty, _ = NamedModel(model, "auto", revision, trust_remote_code).empty(False)
    ift, files = sparse_ift_files(empty, {k: v for k, v in section.items() if v is not None}, recipe)
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    typer.echo(
        ift.plan.to_json()
        if as_json
        else f"{ift.plan.text(all_rows=all_rows)}\n\nWritten to {out}: {', '.join(files)}."
    )


@app.command()
def finalize(
    source: Annotated[
        Path, typer.Option("--input", help="A safetensors file with NaN in the place of pruned weights.")
    ],
    destination: Annotated[Path, typer.Option("--output", help="The file to write, with 0 for them.")],
) -> None:
    """Write 0 for NaN, which marks pruned weights in a file."""
    masks, count = training.finalize(source, destination)
    typer.echo(f"{len(masks)} of {count} tensors held pruned weights. Written to {destination}.")


def main() -> None:
    """Entry point. Wrong input is reported in one line with exit code 2; Ctrl-C ends with exit code 130.

    Neither shows a traceback.
    """
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings(), launched_group():
        warnings.showwarning = lambda message, *_: _complain(f"warning: {message}")
        try:
            app()
        except SystemExit as done:
            if done.code == INTERRUPTED:  # what typer makes of Ctrl-C
                _complain("interrupted")
            raise
        except RankError as error:
            _complain(error)
            sys.exit(RANK_LOST)
        except (ValueError, TypeError, OSError, SafetensorError, MemoryError, torch.OutOfMemoryError) as error:
            _complain(error)
            sys.exit(WRONG_INPUT)


def _complain(message: object) -> None:
    """Print a message on standard error, in one line; in another rank than 0 with the rank."""
    speaker = f"rank {rank()}: " if rank() > 0 else ""
    typer.echo(f"modelopt-sparse: {speaker}{' '.join(str(message).split())}", err=True)


def _evaluate(
    network: nn.Module, dense: nn.Module | None, tokens: torch.Tensor, settings: dict[str, Any]
) -> mts.Evaluation:
    """Evaluate a model, and the dense one if there is one, with the settings of the command line."""
    options = {key: settings[key] for key in ("batch_size", "progress") if key in settings}
    seq_len = settings.get("seq_len") or default_seq_len(network)
    return mts.evaluate(network, tokens, seq_len=seq_len, reference=dense, **options)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
