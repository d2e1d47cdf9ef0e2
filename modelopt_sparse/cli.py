"""The command line: `modelopt-sparse sparsify | plan | eval | verify | report`. Thin over the public API.

Exit codes: 0 done; 1 verify found a violation; 2 wrong arguments or input; 130 Ctrl-C.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import click
import torch
import transformers
import typer
import yaml
from torch import nn
from transformers import AutoProcessor, AutoTokenizer

import modelopt_sparse as mts
from modelopt_sparse.calibration.batches import default_seq_len, read_documents, tokenize
from modelopt_sparse.checkpoint import model_class

DTYPES = ("auto", "float32", "bfloat16", "float16")
# options that are Python objects and have no place in a YAML file
PYTHON_ONLY = ("data_loader", "collect_func", "forward_loop", "tokenizer", "options", "data")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder or a hub name.")]
Dtype = Annotated[str, typer.Option(help=f"Weights' dtype: {', '.join(DTYPES)} (auto: as stored).")]
Revision = Annotated[str | None, typer.Option(help="Hub revision.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]
Device = Annotated[str | None, typer.Option(help="Where to run, for example cuda. Default: the CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Method = Annotated[str, typer.Option(help="magnitude, wanda, ria or sparsegpt.")]
Pattern = Annotated[str | None, typer.Option(help="2:4, any N:M (N kept), or a pruned fraction such as 50%.")]
Data = Annotated[Path | None, typer.Option(help="Calibration text: a .txt file, or .jsonl with a text key.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of any options of the API; flags win over it.")
]
Options = Annotated[
    list[str] | None, typer.Option("--set", help="Any option of the API or the method as KEY=VALUE (VALUE is YAML).")
]
Include = Annotated[list[str] | None, typer.Option(help="Glob of layers to prune; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Glob of layers to leave dense; may be repeated.")]
Samples = Annotated[int | None, typer.Option(help="Calibration windows (128).")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens per window (2048, or the model's maximum).")]
BatchSize = Annotated[int | None, typer.Option(help="Windows per batch (8).")]
Sequential = Annotated[str | None, typer.Option(help="block, stage or none.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the choice of windows (0).")]
Progress = Annotated[bool | None, typer.Option("--progress/--no-progress", help="Default: a bar on a terminal.")]


@app.command()
def sparsify(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    method: Method = "sparsegpt",
    pattern: Pattern = None,
    data: Data = None,
    num_samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    include: Include = None,
    exclude: Exclude = None,
    sequential: Sequential = None,
    seed: Seed = None,
    config: ConfigFile = None,
    options: Options = None,
    eval_data: Annotated[
        Path | None, typer.Option("--eval", help="Held-out text: print perplexity before and after, and KL.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that exists.")] = False,
    progress: Progress = None,
    as_json: Json = False,
) -> None:
    """Make MODEL sparse and write a folder that plain transformers loads."""
    settings = _settings(locals(), config, options)
    if out.exists() and not overwrite:
        raise ValueError(f"{str(out)!r} exists: give another --out, or --overwrite")
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    network = _load(model, dtype, hub, device=None)
    given = _with_text(settings, data, model, hub)
    mts.sparsify(network, method, given, device=device)
    found = mts.report(network)
    evaluation = None
    if eval_data is not None:
        dense = _load(model, dtype, hub, device=device)
        evaluation = _evaluate(network.to(device or "cpu"), dense, eval_data, model, hub, settings, progress)
    mts.save(network.to("cpu"), out)
    _copy_companions(model, hub, out)
    if as_json:
        _print_json({"out": str(out), "evaluation": evaluation and evaluation.as_dict(), "report": found.as_dict()})
        return
    typer.echo(found)
    if evaluation is not None:
        typer.echo(
            f"\nheld-out perplexity: dense {evaluation.reference_perplexity:.3f}, sparse {evaluation.perplexity:.3f}; "
            f"KL from dense {evaluation.kl:.4f} nats per token; {evaluation.windows} windows of "
            f"{evaluation.seq_len} tokens"
        )
    typer.echo(
        f"\nWritten to {out}: load it with transformers, or with modelopt_sparse.load to keep training it sparse."
    )


@app.command()
def plan(
    model: Model,
    method: Method = "sparsegpt",
    pattern: Pattern = None,
    include: Include = None,
    exclude: Exclude = None,
    num_samples: Samples = None,
    seq_len: SeqLen = None,
    config: ConfigFile = None,
    options: Options = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what sparsify would do to MODEL, and why the rest stays dense. Reads no weights."""
    settings = _settings(locals(), config, options)
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    architecture = model_class(model, **hub)
    with torch.device("meta"):
        network = architecture(transformers.AutoConfig.from_pretrained(model, **hub))
    made = mts.make_plan(network, method, settings)
    typer.echo(made.to_json() if as_json else made)


@app.command(name="eval")
def eval_(
    model: Model,
    data: Annotated[Path, typer.Option(help="Held-out text: a .txt file, or .jsonl with a text key.")],
    reference: Annotated[str | None, typer.Option(help="The dense model: its perplexity and the KL from it.")] = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    progress: Progress = None,
    as_json: Json = False,
) -> None:
    """Perplexity of MODEL on held-out text, beside that of the dense model, and the KL divergence from it."""
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    network = _load(model, dtype, hub, device=device)
    dense = None if reference is None else _load(reference, dtype, hub, device=device)
    settings = {"seq_len": seq_len, "batch_size": batch_size}
    found = _evaluate(network, dense, data, model, hub, settings, progress)
    if as_json:
        _print_json(found.as_dict())
    else:
        typer.echo(found)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    pattern: Annotated[str | None, typer.Option(help="Pattern asked of every pruned layer.")] = None,
    as_json: Json = False,
) -> None:
    """Check the weights in DIR against a pattern, or against the one in its own report. Exit code 1 if they fail."""
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder")
    try:
        found = mts.verify(folder, pattern)
    except ValueError as error:
        typer.echo(f"modelopt-sparse: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        _print_json([vars(layer) for layer in found.layers])
    else:
        typer.echo(found)


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="DIR")], as_json: Json = False) -> None:
    """Show what was done to the model in DIR: per layer the recipe, pattern, zeros, error and time."""
    found = mts.report(folder)
    typer.echo(found.to_json() if as_json else found)


def main() -> None:
    """Entry point: user errors become one line and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        typer.echo("modelopt-sparse: interrupted", err=True)
        sys.exit(130)
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"modelopt-sparse: {error}", err=True)
        sys.exit(2)


def _settings(flags: dict[str, Any], config: Path | None, options: list[str] | None) -> dict[str, Any]:
    """The API's options: the YAML file, then --set, then the flags, the later ones winning."""
    settings: dict[str, Any] = {}
    if config is not None:
        loaded = yaml.safe_load(config.read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            raise ValueError(f"{str(config)!r} must hold a mapping of options")
        settings.update(loaded)
    for item in options or []:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item!r}: write KEY=VALUE")
        settings[key] = yaml.safe_load(value)
    for key in set(settings) & set(PYTHON_ONLY):
        raise ValueError(f"option {key!r} is a Python object; on the command line use --data")
    known = {item.name for item in fields(mts.SparsifyConfig)}
    settings.update(
        {key: value for key, value in flags.items() if key in known and key != "data" and value is not None}
    )
    settings.pop("device", None)
    return settings


def _load(model: str, dtype: str, hub: dict[str, Any], device: str | None) -> nn.Module:
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: allowed are {', '.join(DTYPES)}")
    network = model_class(model, **hub).from_pretrained(model, dtype=dtype, **hub)
    return network.to(device) if device is not None else network


def _with_text(settings: dict[str, Any], data: Path | None, model: str, hub: dict[str, Any]) -> dict[str, Any]:
    if data is None:
        return settings
    return {**settings, "data": data, "tokenizer": AutoTokenizer.from_pretrained(model, **hub)}


def _evaluate(
    network: nn.Module,
    dense: nn.Module | None,
    data: Path,
    model: str,
    hub: dict[str, Any],
    settings: dict[str, Any],
    progress: bool | None,
) -> mts.Evaluation:
    tokens = tokenize(AutoTokenizer.from_pretrained(model, **hub), read_documents(data))
    seq_len = settings.get("seq_len") or default_seq_len(network)
    batch_size = settings.get("batch_size") or 8
    return mts.evaluate(network, tokens, seq_len=seq_len, reference=dense, batch_size=batch_size, progress=progress)


def _copy_companions(model: str, hub: dict[str, Any], out: Path) -> None:
    """Tokenizer, chat template and processor travel with the model; a model may have none of them."""
    loaders: list[Callable[..., Any]] = [AutoTokenizer.from_pretrained, AutoProcessor.from_pretrained]
    for loader in loaders:
        try:
            loader(model, **hub).save_pretrained(out)
        except (OSError, ValueError, KeyError):
            continue


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
