"""What the commands do: a function for each, of the name and with the options that `cli.commands` declares.

Thin over the public API.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from safetensors import SafetensorError
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.calibration.data import tokens_of
from modelopt_sparse.checkpoint.folder import checked_place, read_description, read_mask
from modelopt_sparse.checkpoint.verify import PatternError
from modelopt_sparse.checkpoint.workfolder import locked
from modelopt_sparse.cli.inputs import NamedModel, data_of, read_evaluation, settings_of, torch_dtype
from modelopt_sparse.cli.names import RANK_LOST, VIOLATION, WRONG_INPUT, complain
from modelopt_sparse.distributed import RankError, launched_group, rank, while_others_wait
from modelopt_sparse.model.hf import default_seq_len
from modelopt_sparse.reports.page import checked_page, drawn_masks
from modelopt_sparse.training.sparse_ift.recipe import sparse_ift_files


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Within it a command runs, with the other processes of torchrun: wrong input is one line and an exit code."""
    transformers.utils.logging.disable_progress_bar()
    with launched_group():
        try:
            yield
        except RankError as error:
            complain(error)
            sys.exit(RANK_LOST)
        except (ValueError, TypeError, OSError, SafetensorError, MemoryError, torch.OutOfMemoryError) as error:
            complain(error)
            sys.exit(WRONG_INPUT)


def sparsify(
    *,
    model: str,
    out: Path,
    config: Path | None,
    options: list[str] | None,
    eval_data: str | None,
    dtype: str,
    dequantize: bool,
    revision: str | None,
    trust_remote_code: bool,
    stream: bool,
    spill: bool,
    overwrite: bool,
    html: bool,
    progress: bool | None,
    quiet: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    settings = settings_of({**flags, "progress": progress}, config, options)
    if rank() > 0 or (quiet and progress is None):
        progress = settings["progress"] = False
    _check_streaming(stream, spill, eval_data)
    if not stream:  # a streaming run may continue an earlier one, and looks by itself
        checked_place(out, overwrite=overwrite, sources=[model])
    page = _page_beside(out, overwrite) if html else None
    source = NamedModel(model, dtype, revision, trust_remote_code, progress)
    method = settings.pop("method")
    held_out = _read_texts(source, settings, eval_data)
    empty, quantized = source.empty(dequantize, read=True)
    planned = mts.make_plan(empty, method, settings)  # what is wrong is found here, before weights are read
    if "data" not in settings and (needing := [layer for layer in planned.layers if layer.calibrated]):
        raise ValueError(f"method {needing[0].recipe!r} needs calibration text: give --data FILE")

    if stream:
        more = {"overwrite": overwrite, "spill": spill, "dtype": dtype, "dequantize": dequantize, **source.hub}
        sparsity_report = mts.sparsify_checkpoint(model, out, method, settings, **more)
    else:
        with locked(out) if rank() == 0 else nullcontext():
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
                    both = network.to(place), source.load(place, quantized)
                    mts.report(network).evaluation = _evaluate(*both, held_out, settings)
                mts.save(network.to("cpu"), out, overwrite=overwrite, companions=companions)
        sparsity_report = mts.report(network)
    if page is not None and rank() == 0:
        sparsity_report.to_html(page, title=out.resolve().name, masks=_masks_in(out, sparsity_report))
    if as_json or not quiet:
        _show_result(out, sparsity_report, page, as_json)


def _check_streaming(stream: bool, spill: bool, eval_data: str | None) -> None:
    if stream and eval_data is not None:
        raise ValueError(
            "--eval holds the whole model, which --stream never does: leave it out, and use eval afterwards"
        )
    if spill and not stream:
        raise ValueError("--spill goes with --stream")


def _page_beside(out: Path, overwrite: bool) -> Path:
    """The path of the page of the folder ``out``. Raises ValueError if it cannot be written there, before any work."""
    page = checked_page(out.parent / f"{out.resolve().name}.html")
    if page.exists() and not overwrite:
        raise ValueError(f"{str(page)!r} exists: --overwrite replaces it, or give another --out")
    return page


def _masks_in(folder: Path, sparsity_report: mts.Report) -> dict[str, torch.Tensor]:
    """The masks in a folder that a page of its report shows."""
    description = read_description(folder)
    return {name: read_mask(folder, description, name) for name in drawn_masks(sparsity_report, description.masks)}


def _read_texts(source: NamedModel, settings: dict[str, Any], eval_data: str | None) -> torch.Tensor | None:
    """The tokens of the held-out text; and the tokenizer, put into the settings of a run with calibration text."""
    tokenizer = source.tokenizer() if "data" in settings or eval_data is not None else None
    if "data" in settings:
        settings["tokenizer"] = tokenizer
    return None if eval_data is None else tokens_of(data_of(eval_data, "test"), tokenizer)


def _show_result(out: Path, sparsity_report: mts.Report, page: Path | None, as_json: bool) -> None:
    """Print what `sparsify` has done."""
    if as_json:
        report = sparsity_report.as_dict()
        _print_json({"out": str(out), "evaluation": report["evaluation"], "report": report})
        return
    typer.echo(sparsity_report)
    typer.echo(
        f"\nWritten to {out}: load it with transformers, or with modelopt_sparse.load to keep it sparse in training."
    )
    if page is not None:
        typer.echo(f"The report as a page: {page}")


def plan(
    *,
    model: str,
    config: Path | None,
    options: list[str] | None,
    training_recipe: Path | None,
    dtype: str,
    dequantize: bool,
    revision: str | None,
    trust_remote_code: bool,
    all_rows: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    settings = settings_of(flags, config, options, check_device=False)  # the device may be another machine's
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


def eval_(
    *,
    model: str,
    data: str | None,
    reference: str | None,
    special_tokens: bool,
    tasks: str | None,
    task_folder: Path | None,
    shots: int | None,
    limit: int | None,
    chat_template: bool,
    seq_len: int | None,
    batch_size: int | None,
    device: str | None,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,
    progress: bool | None,
    as_json: bool,
) -> None:
    if data is None and tasks is None:
        raise ValueError("nothing to measure: give --data FILE, for perplexity, or --tasks A,B")
    settings = settings_of({"seq_len": seq_len, "batch_size": batch_size, "device": device, "progress": progress})
    source = NamedModel(model, dtype, revision, trust_remote_code, progress)
    beside = None if reference is None else NamedModel(reference, dtype, None, trust_remote_code, progress)
    tokenizer = source.tokenizer()
    tokens = None
    if data is not None:
        tokens = tokens_of(data_of(data, "test"), tokenizer, special_tokens=special_tokens)
    place = device or "cpu"
    network, dense = source.load(place), None if beside is None else beside.load(place)
    evaluation = None if tokens is None else _evaluate(network, dense, tokens, settings)
    scores = None
    if tasks is not None:
        options = {"task_folder": task_folder, "shots": shots, "limit": limit, "chat_template": chat_template}
        scores = mts.evaluate_tasks(network, tokenizer, tasks, reference=dense, batch_size=batch_size, **options)
    if as_json:
        shown = {} if evaluation is None else evaluation.as_dict()
        _print_json(shown if scores is None else {**shown, "tasks": scores.as_dict()})
    else:
        typer.echo("\n\n".join(str(each) for each in (evaluation, scores) if each is not None))


def verify(
    *, folder: Path, pattern: str | None, trust_remote_code: bool, all_rows: bool, quiet: bool, as_json: bool
) -> None:
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
        complain(violation)
        raise typer.Exit(VIOLATION)


def report(
    *,
    folder: Path,
    html: Path | None,
    compare: Path | None,
    evaluation: Path | None,
    all_rows: bool,
    as_json: bool,
) -> None:
    if compare is not None and html is None:
        raise ValueError("--compare goes with --html FILE: two runs are shown side by side on a page")
    sparsity_report = mts.report(folder)
    if evaluation is not None:
        sparsity_report.evaluation, sparsity_report.tasks = read_evaluation(evaluation)
    if html is not None:
        for place in (folder, compare):
            if place is not None and html.resolve().is_relative_to(place.resolve()):
                raise ValueError(f"--html {str(html)!r} is inside of the model's folder: give a path beside it")
        name = folder.resolve().name
        if compare is None:
            sparsity_report.to_html(html, title=name, masks=_masks_in(folder, sparsity_report))
        else:
            sparsity_report.to_html(html, title=name, compare=mts.report(compare), compare_title=compare.resolve().name)
    if as_json:
        typer.echo(sparsity_report.to_json())
    else:
        typer.echo(sparsity_report.text(all_rows=all_rows) if html is None else f"Written to {html}.")


def speed(
    *,
    folder: Path,
    tokens: str,
    timing: str,
    quantize: str | None,
    cache: Path | None,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    if wrong := [count for count in tokens.split(",") if not count.strip().isdecimal()]:
        raise ValueError(f"--tokens {tokens}: {wrong[0]!r} is no number of tokens; write for example 1,64,2048")
    asked = torch_dtype(dtype)
    options = {"tune": tuple(map(int, tokens.split(","))), "timing": timing, "quantize": quantize, "cache": cache}
    dtype_option = {} if asked is None else {"dtype": asked}
    model = mts.load(
        folder, semi_structured=options, device_map=device, trust_remote_code=trust_remote_code, **dtype_option
    )
    speed_report = mts.semi_structured_report(model)
    typer.echo(speed_report.to_json() if as_json else speed_report)


def sparse_ift(
    *,
    model: str,
    sparsity: float,
    out: Path,
    member: str,
    iso: str,
    multiple: int,
    include: list[str] | None,
    recipe: Path | None,
    overwrite: bool,
    revision: str | None,
    trust_remote_code: bool,
    all_rows: bool,
    as_json: bool,
) -> None:
    section = {"sparsity": sparsity, "member": member, "iso": iso, "multiple": multiple, "include": include}
    place = checked_place(out, overwrite=overwrite, sources=[model])
    empty, _ = NamedModel(model, "auto", revision, trust_remote_code).empty(False)
    ift, files = sparse_ift_files(empty, {k: v for k, v in section.items() if v is not None}, recipe)
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    shown = ift.plan.text(all_rows=all_rows)
    typer.echo(ift.plan.to_json() if as_json else f"{shown}\n\nWritten to {out}: {', '.join(files)}.")


def finalize(*, source: Path, destination: Path) -> None:
    masks, count = training.finalize(source, destination)
    typer.echo(f"{len(masks)} of {count} tensors held pruned weights. Written to {destination}.")


def _evaluate(
    network: nn.Module, dense: nn.Module | None, tokens: torch.Tensor, settings: dict[str, Any]
) -> mts.Evaluation:
    """Evaluate a model, and the dense one if there is one, with the settings of the command line."""
    options = {key: settings[key] for key in ("batch_size", "progress") if key in settings}
    seq_len = settings.get("seq_len") or default_seq_len(network)
    return mts.evaluate(network, tokens, seq_len=seq_len, reference=dense, **options)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
