"""The command line: `modelopt-sparse COMMAND`.

A command is one function: its signature declares the options, its body calls the public API. What needs torch is
imported in the bodies, so that help texts, the version and completion come at once.
"""

import functools
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import modelopt_sparse as mts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from modelopt_sparse.cli.inputs import NamedModel

# the keys of METHODS, QUALITIES, MEMBERS and CRITERIA, whose modules import torch; a test holds them equal
CRITERIA = ("gram", "norm", "minitron")
EXPERT_CRITERIA = ("reap", "reap_sum", "frequency")
METHODS = ("magnitude", "wanda", "ria", "sparsegpt", "alps")
QUALITIES = ("fast", "balanced", "best", "max")
MEMBERS = ("wide", "parallel", "factorized", "doped")
DTYPES = ("auto", "float32", "bfloat16", "float16")

VIOLATION, WRONG_INPUT, RANK_LOST, INTERRUPTED = 1, 2, 3, 130  # exit codes

LONGEST = 10_000  # characters of a message

HELP = """Make PyTorch and Hugging Face language models sparse, and see what that cost.

Exit codes: 0 done; 1 verify found layers that break their pattern; 2 wrong arguments or input; 3 another process of the
run stopped or died (torchrun); 130 Ctrl-C.
"""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """Entry point. Wrong input is one line and exit code 2; Ctrl-C is exit code 130. Neither shows a traceback."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: complain(f"warning: {message}")
        try:
            app()
        except SystemExit as done:
            if done.code == INTERRUPTED:  # what typer makes of Ctrl-C
                complain("interrupted")
            raise
        except Exception as error:
            from modelopt_sparse.cli.inputs import WRONG  # a command was running, so torch is imported

            if not isinstance(error, (mts.RankError, *WRONG)):
                raise
            complain(_as_flags(str(error)))
            sys.exit(RANK_LOST if isinstance(error, mts.RankError) else WRONG_INPUT)


def complain(message: object) -> None:
    """Print a message on standard error, in one line; every process but rank 0 of torchrun adds its rank."""
    launched = os.environ.get("WORLD_SIZE", "1") != "1"
    rank = os.environ.get("RANK", "0") if launched else "0"
    speaker = "" if rank == "0" else f"rank {rank}: "
    text = " ".join(str(message).split())
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ... ({len(text):,} characters in all)"
    typer.echo(f"modelopt-sparse: {speaker}{text}", err=True)


def _as_flags(message: str) -> str:
    """A message of the API with options as they are called here: --batch-size 1 for batch_size=1."""
    names = "|".join(name for verb in (sparsify, shrink, eval_) for name in inspect.signature(verb).parameters)
    flags = re.compile(rf"(?<![-\w'\"])({names})=(True\b|(?=[\s,;:)]|$))?")
    return flags.sub(lambda m: f"--{m[1].replace('_', '-')}{' ' if m[2] is None else ''}", message)


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"--dtype {name}: allowed are {', '.join(DTYPES)}")
    return name


# options of several commands ------------------------------------------------------------------------------------------

Model = Annotated[str, Argument(metavar="MODEL", help="A folder or a hub name.")]
Folder = Annotated[Path, Argument(metavar="DIR", help="A folder that sparsify wrote.")]
Out = Annotated[Path, Option(help="Folder to write.")]
OF_AUTO = "auto: that in config.json; of a sparse folder, as stored"
Dtype = Annotated[str, Option(callback=_known_dtype, help=f"Weights' dtype: {', '.join(DTYPES)} ({OF_AUTO}).")]
Dequantize = Annotated[bool, Option("--dequantize", help="MODEL is quantized (fp8, mxfp4): decode it to --dtype.")]
Revision = Annotated[str | None, Option(help="Hub revision.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run the model's own code.")]
Progress = Annotated[bool | None, Option(help="Default: one bar, on a terminal. --progress: every library's bars.")]
AllRows = Annotated[bool, Option("--all", help="A line for each layer; else equal ones are folded.")]
Packed = Annotated[bool, Option("--packed", help="Do not store pruned places: smaller files, which unpack reads.")]
Stream = Annotated[bool, Option("--stream", help="Never hold the whole model; started again, go on where it stopped.")]
Spill = Annotated[bool, Option("--spill", help="With --stream: hold activations in files beside the output folder.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the model in a folder that is not empty.")]
Quiet = Annotated[bool, Option("--quiet", help="Print nothing but warnings and errors, unless --json.")]
Json = Annotated[bool, Option("--json", help="Print JSON on standard output, and nothing else there.")]


def _named_model(
    model: Model,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> "NamedModel":
    """What ``source`` stands for in commands: the model that MODEL names, and options of how it is loaded."""
    from modelopt_sparse.cli.inputs import NamedModel

    return NamedModel(model, dtype, revision, trust_remote_code)


def _flags(
    method: str | None = Option(None, help=f"{', '.join(METHODS)}. Default: sparsegpt, or what --quality chooses."),
    quality: str | None = Option(None, help=f"{', '.join(QUALITIES)}: chooses the method and what follows it."),
    pattern: str | None = Option(None, help="2:4, any N:M (N kept), or a pruned fraction such as 50%. Default: 2:4."),
    budget: str | None = Option(None, help="'35% zeros' or '60% flops' of all layers: what each becomes is chosen."),
    choices: str | None = Option(None, metavar="A,B", help="With a budget: what a layer may become. dense,2:4 or so."),
    losses: Path | None = Option(None, help="JSON file that keeps what choices lose, for other budgets."),
    output: str | None = Option(None, help="What counts of the model's output, by name or number. Default: logits."),
    divergence: str | None = Option(None, help="kl, squared or bernoulli. Default: kl of logits, else squared."),
    data: str | None = Option(
        None,
        metavar="FILE",
        help="Calibration text: .txt, .jsonl, a folder, a data set NAME[:CONFIG[:SPLIT]], or self.",
    ),
    num_samples: int | None = Option(None, help="Calibration windows. Default: 128."),
    seq_len: int | None = Option(None, help="Tokens per window. Default: 2048, or the model's maximum."),
    batch_size: int | None = Option(None, help="Windows per batch. Default: about 2048 tokens on the CPU, else 8."),
    include: list[str] | None = Option(None, help="Glob of layers to prune; may be repeated."),
    exclude: list[str] | None = Option(None, help="Glob of layers to leave dense; may be repeated."),
    sequential: str | None = Option(None, help="block, stage or none: what is sparse before a layer. Default: block."),
    seed: int | None = Option(None, help="Seed of the choice of windows. Default: 0."),
    config: Path | None = Option(None, help="YAML file of any options of the API; --set and flags win over it."),
    options: list[str] | None = Option(
        None, "--set", metavar="KEY=VALUE", help="Any option of the API or of the method; VALUE is YAML."
    ),
    device: str | None = Option(None, help="Where to run, for example cuda. Default: the CPU."),
) -> None:
    """What ``**flags`` stand for in commands: options of the API, which `settings_of` reads."""


EVERY_FLAG = inspect.signature(_flags).parameters
EVALUATED_BY = ("seq_len", "batch_size", "output", "divergence")
FLAGS = {  # name of a command's ``**`` parameter -> those of `_flags` that it stands for
    "flags": tuple(EVERY_FLAG),
    "text_flags": ("data", "num_samples", *EVALUATED_BY, "options", "device"),
    "evaluation_flags": (*EVALUATED_BY, "device"),
}


# commands -------------------------------------------------------------------------------------------------------------


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"modelopt-sparse {mts.__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _root(
    version: bool = Option(False, "--version", is_eager=True, callback=_show_version, help="Show the version."),
) -> None:
    """What the command line has besides its commands."""


def command(body: Callable[..., None]) -> Callable[..., None]:
    """Make ``body`` a command, which joins the processes of torchrun; its ``source`` stands for the parameters of
    `_named_model`, and ``**flags`` for those that `FLAGS` says."""
    of_body, of_model = inspect.signature(body).parameters, inspect.signature(_named_model).parameters

    @functools.wraps(body, assigned=("__name__", "__doc__"))  # not the annotations, which typer would evaluate
    def run(**arguments: Any) -> None:
        import transformers

        from modelopt_sparse.distributed import launched_group

        transformers.utils.logging.disable_progress_bar()
        with launched_group():
            if "source" in of_body:
                arguments["source"] = _named_model(**{name: arguments.pop(name) for name in of_model})
            body(**arguments)

    groups = {"source": of_model, **{name: {x: EVERY_FLAG[x] for x in flags} for name, flags in FLAGS.items()}}
    names = sorted(of_body, key=lambda name: name != "flags")
    parameters = [parameter for name in names for parameter in groups.get(name, {name: of_body[name]}).values()]
    required_first = sorted(parameters, key=lambda parameter: parameter.default is not parameter.empty)
    vars(run)["__signature__"] = inspect.Signature(required_first)  # what typer reads
    return app.command(body.__name__.strip("_").replace("_", "-"))(run)


@command
def sparsify(
    source: "NamedModel",
    out: Out,
    eval_data: str | None = Option(None, "--eval", metavar="FILE", help="Held-out text: measure perplexities and KL."),
    dequantize: Dequantize = False,
    stream: Stream = False,
    spill: Spill = False,
    packed: Packed = False,
    overwrite: Overwrite = False,
    html: bool = Option(False, "--html", help="Write the report as a page as well: OUT.html, beside the folder."),
    progress: Progress = None,
    quiet: Quiet = False,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Make MODEL sparse and write a folder. Plain transformers loads it. Processes of torchrun share the work."""
    from modelopt_sparse.checkpoint.folder import checked_place
    from modelopt_sparse.cli.inputs import settings_of, tokens_in
    from modelopt_sparse.distributed import rank
    from modelopt_sparse.oneshot import what_needs_data
    from modelopt_sparse.plan.planner import resolve

    if stream and eval_data is not None:
        raise ValueError("--eval holds the whole model, which --stream never does: use eval afterwards")
    if spill and not stream:
        raise ValueError("--spill goes with --stream")
    if rank() > 0 or (quiet and progress is None):
        progress = False
    if not stream:  # a streaming run may go on with an earlier one, and checks the folder itself
        checked_place(out, overwrite=overwrite, sources=[source.name])
    page = _new_page(out.parent / f"{out.resolve().name}.html", overwrite) if html else None
    settings = settings_of(source, **flags, progress=progress)
    held_out = None if eval_data is None else tokens_in(eval_data, source.tokenizer)
    method = settings.pop("method")
    empty, quantized = source.empty(dequantize, read=True)
    planned = mts.make_plan(empty, method, settings)  # what is wrong is found here, before weights are read
    if "data" not in settings and (needing := what_needs_data(planned, resolve(method, None, settings)[1])):
        raise ValueError(f"{needing[0]} needs calibration text: give --data FILE")
    where: dict[str, Any] = {"overwrite": overwrite, "packed": packed}
    if stream:
        where |= {"spill": spill, "dequantize": dequantize, "dtype": source.dtype, **source.hub}
        with _kept_blocks_are_said(out, f" of {sum(len(stack.names) for stack in planned.stacks)}"):
            streamed = mts.sparsify_checkpoint(source.name, out, method, settings, **where)
        result = streamed if rank() == 0 else None
    else:
        make = functools.partial(mts.sparsify, method=method, config=settings)
        result = _in_memory(make, source, out, settings, held_out=held_out, quantized=quantized, **where)
    if result is None:
        return
    if page is not None and rank() == 0:
        _write_page(page, result, out)
    if as_json:
        values = result.as_dict()
        _print_json({"out": str(out), "evaluation": values["evaluation"], "report": values})
    elif not quiet:
        typer.echo(f"{result}\n\n{_written(out, packed)}")
        if page is not None:
            typer.echo(f"The report as a page: {page}")


def _written(out: Path, packed: bool) -> str:
    """What is said of a folder that is written; of a packed one also what that saves."""
    from modelopt_sparse.checkpoint.packed import saving

    if packed:
        return f"{saving(out)}\n\nWritten to {out}: load it with modelopt_sparse.load; unpack makes it plain."
    loading = "load it with transformers, or with modelopt_sparse.load to keep it sparse in training."
    return f"Written to {out}: {loading}"


def _new_page(page: Path, overwrite: bool, *models: Path) -> Path:
    """The path of a page. Raises ValueError if it cannot be written there, or lies in the folder of a model."""
    from modelopt_sparse.reports.page import checked_page

    if checked_page(page).exists() and not overwrite:
        raise ValueError(f"{str(page)!r} exists: --overwrite replaces it, or give another path")
    if any(page.resolve().is_relative_to(model.resolve()) for model in models):
        raise ValueError(f"--html {str(page)!r} is inside of the model's folder: give a path beside it")
    return page


def _in_memory(
    make: "Callable[[Module], Module]",
    source: "NamedModel",
    out: Path,
    settings: dict[str, Any],
    *,
    quantized: Any = None,
    held_out: "Tensor | None" = None,
    **saving: Any,
) -> "mts.Report | None":
    """Make a model sparse, or smaller, in memory, and write it -> the report; None in a process that another one writes
    for."""
    from modelopt_sparse.checkpoint.workfolder import locked
    from modelopt_sparse.distributed import rank, while_others_wait

    with locked(out) if rank() == 0 else nullcontext():
        companions = source.companions()
        network = make(source.load(quantized=quantized, masks=True))
        report = mts.report(network)
        if quantized is not None:
            report.notes.append(str(quantized))
        with while_others_wait(settings.get("distributed")) as writes:
            if not writes:
                return None
            if held_out is not None:
                place = settings.get("device") or "cpu"
                both = network.to(place), source.load(place, quantized)
                report.evaluation = _evaluate(*both, held_out, settings)
            mts.save(network.to("cpu"), out, companions=companions, **saving)
    return report


@contextmanager
def _kept_blocks_are_said(out: Path, of: str = "") -> Iterator[None]:
    """After Ctrl-C, how many blocks of a streaming run to ``out`` are kept."""
    from modelopt_sparse.checkpoint.workfolder import work_path

    try:
        yield
    except KeyboardInterrupt:
        if done := len(list(work_path(out).glob("block-*.json"))):
            complain(f"{done}{of} blocks are kept in {str(work_path(out))!r}: the same command goes on")
        raise


def _write_page(page: Path, report: "mts.Report", folder: Path) -> None:
    """Write the report of a folder as a page that shows the folder's masks."""
    from modelopt_sparse.checkpoint.folder import read_description, read_mask
    from modelopt_sparse.reports.page import drawn_masks

    description = read_description(folder)
    masks = {name: read_mask(folder, description, name) for name in drawn_masks(report, description.masks)}
    report.to_html(page, title=folder.resolve().name, masks=masks)


@command
def plan(
    source: "NamedModel",
    training_recipe: Path | None = Option(None, "--training", help="YAML with a section sparsity: plan that instead."),
    dequantize: Dequantize = False,
    all_rows: AllRows = False,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Show what sparsify would do to MODEL, or training. Says why the rest stays dense. Reads no weights."""
    from modelopt_sparse.cli.inputs import settings_of

    settings = settings_of(source, **flags, check_device=False)  # the device may be another machine's
    if training_recipe is not None and (extra := [key for key, value in settings.items() if value is not None]):
        raise ValueError(f"--training shows a recipe of its own: leave {', '.join(sorted(extra))} out")
    empty, quantized = source.empty(dequantize)
    if training_recipe is not None:
        planned: Any = mts.training.configure(training_recipe).plan(empty)
    else:
        planned = mts.make_plan(empty, settings.pop("method"), settings)
        if quantized is not None:
            planned = replace(planned, notes=(*planned.notes, str(quantized)))
    _show(planned, as_json, all_rows=all_rows)


@command
def budget(
    source: "NamedModel",
    progress: Progress = None,
    all_rows: AllRows = False,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Show what budgets of MODEL would cost. KL over zeros, bytes or flops, and the choice of each layer for one."""
    from modelopt_sparse.cli.inputs import settings_of

    settings = settings_of(source, **flags, progress=progress)
    if "data" not in settings:
        raise ValueError("losses of layers are measured on calibration text: give --data FILE")
    curve = mts.budget_curve(source.load(masks=True), settings.pop("method"), **settings)
    _show(curve, as_json, all_rows=all_rows)


@command
def shrink(
    source: "NamedModel",
    out: Path | None = Option(None, help="Folder to write; not with --plan."),
    mlp: str | None = Option(None, help="MLP channels that go, of every block: 25%, or a number."),
    blocks: str | None = Option(None, help="How many blocks go, or which: 4, or [17, 18]."),
    experts: str | None = Option(None, help="Experts that go, of every mixture: 25%, or a number."),
    to: list[str] | None = Option(None, metavar="NAME=SIZE", help="A size by the config's own name; may be repeated."),
    budget: str | None = Option(None, help="What the model may cost instead: 70% params, 75% flops, 12GB bytes."),
    criterion: str | None = Option(
        None, help=f"Of channels: {', '.join(CRITERIA)}; of experts: {', '.join(EXPERT_CRITERIA)}. Default: the first."
    ),
    quality: str | None = Option(None, help=f"{', '.join(QUALITIES)}: what repairs the model. Default: refit alone."),
    show_plan: bool = Option(False, "--plan", help="Show the sizes and what they cost, and stop. Reads no weights."),
    stream: Stream = False,
    spill: Spill = False,
    overwrite: Overwrite = False,
    progress: Progress = None,
    as_json: Json = False,
    **text_flags: Any,
) -> None:
    """Make MODEL smaller: fewer MLP channels, experts or blocks. Write a plain folder, for any engine."""
    from modelopt_sparse.checkpoint.folder import checked_place
    from modelopt_sparse.checks import read_yaml
    from modelopt_sparse.cli.inputs import settings_of
    from modelopt_sparse.distributed import rank

    if spill and not stream:
        raise ValueError("--spill goes with --stream")
    numbers = {"mlp": mlp, "blocks": blocks, "experts": experts}
    sizes: dict[str, Any] = {name: read_yaml(value, f"--{name}") for name, value in numbers.items() if value}
    pairs = [assignment.partition("=") for assignment in to or []]
    sizes |= {"to": {key: read_yaml(size, f"--to {key}") for key, _, size in pairs}, "budget": budget}
    sizes = {name: value for name, value in sizes.items() if value not in (None, {})}
    settings = settings_of(source, criterion=criterion, quality=quality, progress=progress, **text_flags) | sizes
    settings.pop("method")
    of_run = {name: value for name, value in settings.items() if name not in ("data", "tokenizer", "progress")}
    planned = mts.plan_shrink(source.empty(False)[0], **of_run)
    if show_plan:
        _show(planned, as_json)
        return
    if out is None or "data" not in settings:
        raise ValueError("shrink needs --out DIR and --data FILE (or --plan, to see the sizes)")
    if stream:
        where: dict[str, Any] = {"overwrite": overwrite, "spill": spill, "dtype": source.dtype, **source.hub}
        with _kept_blocks_are_said(out):
            result: Any = mts.shrink_checkpoint(source.name, out, **where, **settings)
    else:
        checked_place(out, overwrite=overwrite, sources=[source.name])
        result = _in_memory(functools.partial(mts.shrink, **settings), source, out, settings, overwrite=overwrite)
    if rank() == 0:
        _show(result, as_json, f"\n\nWritten to {out}.")


@command
def eval_(
    source: "NamedModel",
    data: Annotated[
        str, Option(metavar="FILE", help="Held-out text: .txt, .jsonl, a folder, or a data set, such as wikitext2.")
    ],
    reference: str | None = Option(None, help="The dense model: measured too, and the KL from it."),
    special_tokens: bool = Option(False, "--special-tokens", help="Put the tokenizer's before the text, as papers do."),
    progress: Progress = None,
    as_json: Json = False,
    **evaluation_flags: Any,
) -> None:
    """Measure MODEL's perplexity on text. With --reference also the dense model's, and the KL."""
    from modelopt_sparse.cli.inputs import NamedModel, settings_of, tokens_in

    settings = settings_of(source, progress=progress, **evaluation_flags)
    beside = None if reference is None else NamedModel(reference, source.dtype, None, **source.remote)
    tokens = tokens_in(data, source.tokenizer, special_tokens=special_tokens)
    place = settings.pop("device", "cpu")
    _show(_evaluate(source.load(place), None if beside is None else beside.load(place), tokens, settings), as_json)


def _evaluate(
    network: "Module", dense: "Module | None", tokens: "Tensor", settings: dict[str, Any]
) -> "mts.Evaluation":
    """Evaluate a model, and the dense one if there is one, with the settings of the command line."""
    options = {key: settings[key] for key in (*EVALUATED_BY, "progress") if key in settings}
    return mts.evaluate(network, tokens, reference=dense, **options)


@command
def verify(
    folder: Folder,
    pattern: str | None = Option(None, help="Pattern asked of every pruned layer."),
    no_hash: bool = Option(False, "--no-hash", help="Do not compare the files with the SHA-256 they were saved with."),
    trust_remote_code: TrustRemoteCode = False,
    all_rows: AllRows = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check the weights in DIR for a pattern. Default: the one in their report. Exit code 1 if they break it."""
    violation = None
    try:
        verification = mts.verify(folder, pattern, hashes=not no_hash, trust_remote_code=trust_remote_code)
    except mts.PatternError as error:
        verification, violation = error.verification, error
    if as_json:
        _print_json([vars(layer) for layer in verification.layers])
    elif not quiet:
        typer.echo(verification.text(all_rows=all_rows))
    if violation is not None:
        complain(violation)
        raise typer.Exit(VIOLATION)


@command
def report(
    folder: Folder,
    html: Path | None = Option(None, metavar="FILE", help="Write a page with plots and tables instead."),
    compare: Path | None = Option(None, metavar="DIR", help="With --html: another folder, shown side by side."),
    evaluation: list[Path] | None = Option(
        None, metavar="FILE", help="What eval --json printed of the model, or lm_eval wrote. May be repeated."
    ),
    overwrite: bool = Option(False, "--overwrite", help="Replace a page that is there."),
    all_rows: AllRows = False,
    as_json: Json = False,
) -> None:
    """Show what was done to the model in DIR. Per layer: recipe, pattern, zeros, error and time."""
    from modelopt_sparse.cli.inputs import add_evaluation

    if html is not None:
        _new_page(html, overwrite, folder, *filter(None, [compare]))
    if compare is not None and html is None:
        raise ValueError("--compare goes with --html FILE: two runs are shown side by side on a page")
    result = mts.report(folder)
    for file in evaluation or ():
        add_evaluation(result, file)
    if html is not None and compare is not None:
        titles = folder.resolve().name, compare.resolve().name
        result.to_html(html, title=titles[0], compare=mts.report(compare), compare_title=titles[1])
    elif html is not None:
        _write_page(html, result, folder)
    if as_json or html is None:
        _show(result, as_json, all_rows=all_rows)
    else:
        typer.echo(f"Written to {html}.")


@command
def speed(
    folder: Folder,
    tokens: Annotated[str, Option(help="Token counts that matter, for example 1,64,2048.")],
    device: str = Option("cuda", help="The CUDA device to time on."),
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Time the layers in DIR, dense against 2:4, on this GPU. Shows which would run 2:4, and why others stay dense."""
    counts = tokens.split(",")
    if wrong := [count for count in counts if not count.strip().isdecimal()]:
        raise ValueError(f"--tokens {tokens}: {wrong[0]!r} is not a number of tokens; write for example 1,64,2048")
    settings = {"tune": tuple(map(int, counts))}
    loading = {"dtype": dtype, "device_map": device, "trust_remote_code": trust_remote_code}
    result = mts.semi_structured_report(mts.load(folder, semi_structured=settings, **loading))
    _show(result, as_json)


@command
def pack(
    folder: Annotated[Path, Argument(metavar="DIR", help="A folder that sparsify wrote, or a plain one with zeros.")],
    out: Out,
    overwrite: Overwrite = False,
    all_rows: AllRows = False,
    quiet: Quiet = False,
) -> None:
    """Write a copy of DIR without the pruned places of its weights. Shows how much smaller it is."""
    from modelopt_sparse.checkpoint.packed import saving

    notes = mts.pack(folder, out, overwrite=overwrite)
    if not quiet:
        typer.echo("\n".join([saving(out, all_rows=all_rows), "", f"Written to {out}.", *notes]))


@command
def unpack(
    folder: Annotated[Path, Argument(metavar="DIR", help="A packed folder.")],
    out: Out,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Write the plain folder of a packed DIR. Transformers loads it; it is to the bit what was packed."""
    notes = mts.unpack(folder, out, overwrite=overwrite)
    if not quiet:
        typer.echo("\n".join([f"Written to {out}.", *notes]))


@command
def sparse_ift(
    model: Model,
    sparsity: Annotated[float, Option(help="The level, in [0, 1): says how much larger layers become.")],
    out: Annotated[Path, Option(help="Folder to write: config.json and recipe.yaml.")],
    member: str = Option("wide", help=f"{', '.join(MEMBERS)}."),
    iso: str = Option("layers", help="layers or model: whose FLOPs stay (model: wide alone)."),
    multiple: int = Option(1, help="Widths are rounded up to a multiple of this."),
    include: list[str] | None = Option(None, help="Glob of layers to replace; may be repeated."),
    recipe: Path | None = Option(None, help="YAML with a section sparsity, without a level. Default: static."),
    overwrite: bool = Option(False, "--overwrite", help="Write to a folder that is not empty."),
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    all_rows: AllRows = False,
    as_json: Json = False,
) -> None:
    """Write config and recipe of a larger, sparser MODEL. Its FLOPs are those of MODEL."""
    from modelopt_sparse.checkpoint.folder import checked_place
    from modelopt_sparse.cli.inputs import NamedModel
    from modelopt_sparse.training.iso_flop.config import sparse_ift_files

    section = {"sparsity": sparsity, "member": member, "iso": iso, "multiple": multiple}
    section |= {} if include is None else {"include": include}
    place = checked_place(out, overwrite=overwrite, sources=[model])
    empty, _ = NamedModel(model, "auto", revision, trust_remote_code).empty(False)
    ift, files = sparse_ift_files(empty, section, recipe)
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    _show(ift.plan, as_json, f"\n\nWritten to {out}: {', '.join(files)}.", all_rows=all_rows)


@command
def finalize(
    marked: Annotated[Path, Option("--input", help="A safetensors file with NaN in the place of pruned weights.")],
    destination: Annotated[Path, Option("--output", help="The file to write, with 0 for them.")],
) -> None:
    """Write 0 for NaN, which marks pruned weights in a file."""
    if not destination.parent.is_dir():
        raise ValueError(f"--output: there is no folder {str(destination.parent)!r}: make it first")
    masks, count = mts.training.finalize(marked, destination)
    typer.echo(f"{len(masks)} of {count} tensors held pruned weights. Written to {destination}.")


def _show(value: Any, as_json: bool, after: str = "", *, all_rows: bool = False) -> None:
    """Print a report or a plan. ``after``: what follows its text."""
    typer.echo(value.to_json() if as_json else value.text(all_rows=all_rows) + after)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
