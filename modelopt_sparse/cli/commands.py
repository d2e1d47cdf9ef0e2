"""The command line: `modelopt-sparse sparsify | plan | eval | verify | report | speed | sparse-ift | finalize`.

Here stand the options and the texts; what a command does is the function of its name in `cli.run`. Nothing here imports
torch or transformers, so that help texts, the version and completion come at once.
"""

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from modelopt_sparse import __version__
from modelopt_sparse.cli.names import DTYPES, INTERRUPTED, MEMBERS, METHODS, QUALITIES, complain

HELP = """Make PyTorch and Hugging Face language models sparse, and see what that cost.

Exit codes: 0 done; 1 verify found layers that break their pattern; 2 wrong arguments or input; 3 another process of the
run stopped or died (torchrun); 130 Ctrl-C.
"""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

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
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Calibration text: .txt, .jsonl, a folder, a data set NAME[:CONFIG[:SPLIT]], or self."
    ),
]
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


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"modelopt-sparse {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version, and stop.")
    ] = False,
) -> None:
    """What the command line has besides its commands."""


@app.command()
def sparsify(
    context: typer.Context,
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
        str | None,
        typer.Option("--eval", metavar="FILE", help="Held-out text: perplexity of dense and sparse on it, and KL."),
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
    html: Annotated[
        bool, typer.Option("--html", help="Write the report as a page as well: OUT.html, beside the folder.")
    ] = False,
    progress: Progress = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make MODEL sparse and write a folder. Plain transformers loads it. Processes of torchrun share the work."""
    _run("sparsify", locals())


@app.command()
def plan(
    context: typer.Context,
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
    _run("plan", locals())


@app.command(name="eval")
def eval_(
    context: typer.Context,
    model: Model,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Held-out text: .txt, .jsonl, a folder, or a data set, such as wikitext2. Perplexity."
        ),
    ] = None,
    reference: Annotated[str | None, typer.Option(help="The dense model: measured too, and the KL from it.")] = None,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Put the tokenizer's before the text, as papers do.")
    ] = False,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Tasks of lm-evaluation-harness, such as arc_easy,hellaswag.")
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="YAML files of further tasks, for --tasks.")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Examples before each question. Default: the task's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Ask no more questions of a task than this.")] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Ask in the tokenizer's chat template.")
    ] = False,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    progress: Progress = None,
    as_json: Json = False,
) -> None:
    """Measure MODEL's perplexity on text, and scores on tasks. With --reference also the dense model's, and the KL."""
    _run("eval_", locals())


@app.command()
def verify(
    context: typer.Context,
    folder: Folder,
    pattern: Annotated[str | None, typer.Option(help="Pattern asked of every pruned layer.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    all_rows: AllRows = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check the weights in DIR for a pattern. Default: the one in their report. Exit code 1 if they break it."""
    _run("verify", locals())


@app.command()
def report(
    context: typer.Context,
    folder: Folder,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots and tables, and print only its name.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --html: another folder, shown side by side.")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What eval --json printed of the model in DIR: shown as well.")
    ] = None,
    all_rows: AllRows = False,
    as_json: Json = False,
) -> None:
    """Show what was done to the model in DIR. Per layer: recipe, pattern, zeros, error and time."""
    _run("report", locals())


@app.command()
def speed(
    context: typer.Context,
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
    _run("speed", locals())


@app.command()
def sparse_ift(
    context: typer.Context,
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
    """Write config and recipe of a larger, sparser MODEL. Its FLOPs are those of MODEL."""
    _run("sparse_ift", locals())


@app.command()
def finalize(
    context: typer.Context,
    source: Annotated[
        Path, typer.Option("--input", help="A safetensors file with NaN in the place of pruned weights.")
    ],
    destination: Annotated[Path, typer.Option("--output", help="The file to write, with 0 for them.")],
) -> None:
    """Write 0 for NaN, which marks pruned weights in a file."""
    _run("finalize", locals())


def _run(command: str, arguments: dict[str, Any]) -> None:
    """Run the function ``command`` of `cli.run`. ``arguments``: its own, and the ``context``, whose object is what
    `main` leaves at its end."""
    from modelopt_sparse.cli import run  # imports torch and transformers, which takes seconds: only when a command runs

    arguments.pop("context").obj.enter_context(run.errors_in_one_line())
    getattr(run, command)(**arguments)


def main() -> None:
    """Entry point. Wrong input is reported in one line with exit code 2; Ctrl-C ends with exit code 130.

    Neither shows a traceback.
    """
    with warnings.catch_warnings(), ExitStack() as until_end:
        warnings.showwarning = lambda message, *_: complain(f"warning: {message}")
        try:
            app(obj=until_end)
        except SystemExit as done:
            if done.code == INTERRUPTED:  # what typer makes of Ctrl-C
                complain("interrupted")
            raise
