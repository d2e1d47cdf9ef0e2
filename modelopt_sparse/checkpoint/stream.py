"""Checkpoints larger than memory: read block by block, made sparse or smaller, written block by block.

The model is built without the weights of its blocks; embeddings, norms and heads are there. A block's weights are read
from the source's shards when it is run, and dropped when another block is. After its turn they are written to a shard
of the target, and from then on read from there. Everything between is what `sparsify` or `shrink` does, so the result
is the same to the bit.

transformers' own offloading says where each weight lies, and converts those that are stored otherwise than they stand
in memory (fused experts); its save_pretrained converts them back, block by block.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from modelopt_sparse.calibration.data import Call, digest_of, load_calls
from modelopt_sparse.checkpoint.dequantize import Quantized, dequantization_of
from modelopt_sparse.checkpoint.folder import (
    DESCRIPTION,
    MASKS,
    Description,
    checked_place,
    checksum,
    copy_companions,
    description_of,
    is_full,
    read_description,
    write_description,
    write_masks,
)
from modelopt_sparse.checkpoint.save import report as report_in
from modelopt_sparse.checkpoint.streamed import (
    SourceFiles,
    Streamed,
    concatenate,
    local_folder,
    without_blocks,
    write_index,
)
from modelopt_sparse.checkpoint.workfolder import REPORT, WorkFolder, is_finished, opened, remove_leftovers, work_path
from modelopt_sparse.checks import shown
from modelopt_sparse.distributed import Processes, RankError, rank
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.hf import FLOATS, empty_model
from modelopt_sparse.model.masking import dense_class, named_masks, remove_masks
from modelopt_sparse.oneshot import check_run, prune
from modelopt_sparse.plan.options import OWN_WINDOWS, SparsifyConfig
from modelopt_sparse.plan.plan import Plan, started_with
from modelopt_sparse.plan.planner import distributed_in, plan_for, resolve
from modelopt_sparse.reports.report import Report, merged_report
from modelopt_sparse.run import Run
from modelopt_sparse.shrinking.plan import checked, settings_of_run, shrink_config
from modelopt_sparse.shrinking.shrink import shrink_to_one
from modelopt_sparse.shrinking.sizes import ShrinkRequest, decided

IN_MEMORY = "load the model and call"
UNMEASURED = (
    "KL is not measured in streaming, where each call reads all weights: `modelopt-sparse eval` does so afterwards"
)


def sparsify_checkpoint(
    source: str | Path,
    target: str | Path,
    method: Any = None,
    config: SparsifyConfig | Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
    spill: bool = False,
    dtype: Any = "auto",
    dequantize: bool = False,
    packed: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Report:
    """Make the checkpoint in a folder (or of a hub name) sparse and write it to a folder, without ever holding all of
    it; return the report.

    ``method``, ``config`` and keywords are those of `sparsify`, and so is the result, to the bit, but for what
    "auto" stands for (self_data, metric, distill), as the report says: the folder is what `save` writes, in one shard
    for each block. In memory are what is outside of the blocks, one block and its copy, its statistics, and the
    activations that are held from block to block (``spill``: in files beside the target instead). ``dtype``,
    ``revision`` and ``trust_remote_code`` are those of ``from_pretrained``. ``dequantize``: the checkpoint is
    quantized (fp8, mxfp4), and to be dequantized; without it such a one is refused. ``packed`` is that of `save`.

    A run that was killed goes on from its last finished block when it is called again with the same arguments, and
    ends in the same bits. Called with other arguments, data or weights it raises ValueError, unless ``overwrite`` is
    set: then what is there is replaced. Raises ValueError before any work for what needs the whole model at once, and
    whenever a file of the source is missing, damaged, or another one than at the start; OSError on a full disk. The
    blocks that are done are kept then.

    Under torch.distributed all processes of the default group call it and share the work; the first one writes. Another
    number of them may go on with a run that was stopped: sums are rounded in another way then, and the report says so.
    If one fails or dies, the others raise RankError.
    """
    target = Path(target)
    with Processes.of(distributed_in(config, options)) as processes:
        target = _place(target, source, overwrite=overwrite)
        chosen, settings = resolve(method, config, options)
        _refuse_whole_model(settings, "sparsify")
        remote: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        folder = local_folder(source, revision)
        described = _description_in(folder)
        if described is not None and described.masks and not settings.replace:
            count, advice = len(described.masks), f"{IN_MEMORY} sparsify, or give replace=True, which drops them"
            raise ValueError(f"{str(folder)!r} holds {count} masks, which streaming does not read: {advice}")
        empty = empty_model(folder, **remote)
        quantized = dequantization_of(empty, folder, dtype, dequantize=dequantize)
        plan = plan_for(empty, chosen, settings)
        names = _block_names(empty, plan, "sparsify")
        check_run(plan, settings)
        calibrated = settings.budget is not None or any(layer_plan.calibrated for layer_plan in plan.layers)
        notes: list[str] = []
        calls = load_calls(settings, empty, notes) if calibrated else None
        # all that can be known without work is: from here on there is a work folder

        def work_on(storage: Streamed, work: WorkFolder) -> Report:
            # a run that was stopped after its last block; layers outside of the blocks are in no shard, and come again
            if work.report is not None and all(layer_plan.block is not None for layer_plan in plan.layers):
                return Report.from_dict(work.report)
            report = prune(storage.model, chosen, settings, storage, processes, calls)
            report.notes += notes
            before = described and described.report
            return report if before is None else merged_report(before, report)

        started = started_with(plan, settings)
        job = _Job(folder, names, started, calls, work_on, dtype, quantized, remote, spill, packed)
        return _streamed(job, target, processes, overwrite=overwrite)


def shrink_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    overwrite: bool = False,
    spill: bool = False,
    dtype: Any = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Report:
    """Make the checkpoint in a folder (or of a hub name) smaller and write it to a folder, without ever holding all of
    it; return the report.

    ``options`` are those of `shrink`, and so is the result, to the bit, but that blocks go by their influence unless
    they are named (blocks_by="kl" calls the whole model again and again, as budget and distill do: these are refused),
    and that the report tells no KL. What is in memory, ``overwrite``, ``spill``, ``dtype``, ``revision``,
    ``trust_remote_code``, errors, several processes, and runs that were stopped are as in `sparsify_checkpoint`. A run
    that goes on passes over the model once more, to refit, and then takes the blocks that are done as they are.

    >>> report = mts.shrink_checkpoint("large", "smaller", mlp=0.25, data="text.txt", tokenizer=tokenizer)
    """
    options.setdefault("blocks_by", "influence")
    asked = ShrinkRequest.taken_from(options)
    config, instead = shrink_config(options), "give mlp=, blocks= or to="
    budget, by_kl = asked.budget is not None, asked.blocks_by == "kl"
    _refuse_whole_model(config, "shrink", [(budget, "budget", instead), (by_kl, "blocks_by='kl'", instead)])
    with Processes.of(config.distributed) as processes:
        target = _place(Path(target), source, overwrite=overwrite)
        remote: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        folder = local_folder(source, revision)
        if (described := _description_in(folder)) is not None and described.masks:
            raise ValueError(f"{str(folder)!r} is sparse: shrink the model that it was made of, and sparsify it then")
        empty: Any = checked(empty_model(folder, **remote))
        plan = plan_for(empty, Magnitude(), config)
        names = _block_names(empty, plan, "shrink")
        asked = asked.in_full(plan)
        request, sizes = decided(empty, plan, asked, config)
        notes: list[str] = []
        calls = load_calls(config, empty, notes)

        def work_on(storage: Streamed, work: WorkFolder) -> Report:
            model = storage.model
            of_model = plan_for(model, Magnitude(), config)
            report = Report.begin((), [UNMEASURED], settings_of_run(config, request))
            report.notes += notes
            run = Run(model, of_model, config, storage, processes, report)
            shrink_to_one(run, sizes, request, calls)
            return report

        facts = {**asked._asdict(), "kept": asked.kept and checksum(asked.kept)}
        started = started_with(plan, config) | {f"option {name}": str(value) for name, value in facts.items()}
        job = _Job(folder, names, started, calls, work_on, dtype, None, remote, spill)
        return _streamed(job, target, processes, overwrite=overwrite)


@dataclass(frozen=True)
class _Job:
    """What is done to the checkpoint in ``folder``, whose blocks are called ``names``.

    started: what the result depends on, but for the source and the data. calls: those of the data.
    work_on: does the work on a model whose blocks are in a storage.
    """

    folder: Path
    names: list[str]
    started: dict[str, Any]
    calls: list[Call] | None
    work_on: Callable[[Streamed, WorkFolder], Report]
    dtype: Any
    quantized: Quantized | None
    remote: dict[str, Any]
    spill: bool
    packed: bool = False


def _streamed(job: _Job, target: Path, processes: Processes, *, overwrite: bool) -> Report:
    """Do the work from where an earlier run has left it, and put the folder in its place."""
    dtype, files, report = _dtype(job.dtype), SourceFiles(job.folder, processes), None
    notes, started = list[str](), {**job.started, "dtype": str(dtype), **({"packed": True} if job.packed else {})}
    if job.quantized is not None:
        notes.append(str(job.quantized))
        started["quantized source"] = str(job.quantized)
    if processes.size == 1 and rank() > 0:
        raise ValueError(
            f"transformers writes in rank 0 alone, and this is rank {rank()}: stream there, then barrier()"
        )
    processes.check_same(started, "give all of them the same source and the same options")
    with _full_disk_named(target), opened(target, started, processes, overwrite=overwrite) as work:
        if work.done or work.finished:
            work.check(files.hashes, None if job.calls is None else digest_of(job.calls))
        if not work.finished:
            with files.watched():
                model, places = without_blocks(job.folder, job.names, dtype, job.quantized, work, job.remote)
                files.check_all()  # what lies outside of the blocks has been read
                with Streamed(model, job.names, places, work, files, spill=job.spill, packed=job.packed) as storage:
                    report = job.work_on(storage, work)
                    if storage.reused:
                        begun_by, reused = work.begun_by, f"{storage.reused} of {len(job.names)} blocks were reused"
                        others = f" of {begun_by} process{'es' * (begun_by > 1)}" * (begun_by != processes.size)
                        notes.append(f"{reused} from a stopped run{others}")
                    report.notes += [note for note in notes if note not in report.notes]
                    # the work folder moves in the end: others may still read there, where all blocks were done before
                    processes.all_gather("the end of the work")
                    if work.leads:
                        _finish(storage, job.folder, work, report)
        elif work.leads:
            work.put_in_place()
        processes.barrier()
    return report_in(target) if report is None else report


def _place(target: Path, source: str | Path, *, overwrite: bool) -> Path:
    remove_leftovers(target)
    # a run that has finished its target may have begun to fill it
    return checked_place(target, overwrite=overwrite or is_finished(target), sources=[source])


@contextmanager
def _full_disk_named(target: Path) -> Iterator[None]:
    """Errors of a full disk inside name the target, and say what is left of it."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RankError) or not is_full(error):  # another process names its own disk
            raise
        work = work_path(target)
        left = f"blocks are kept in {str(work)!r}" if any(work.glob("block-*.json")) else "nothing is left of it"
        problem = f"could not be written, because the disk is full ({error}): free space and start the run again"
        raise OSError(f"{str(target)!r} {problem}; {left}") from error


# what cannot be streamed ----------------------------------------------------------------------------------------------


def _refuse_whole_model(config: SparsifyConfig, verb: str, further: Iterable[tuple[bool, str, str]] = ()) -> None:
    """Raise ValueError for options that need the whole model at once."""
    own_text = "data='self'" if config.writes_its_data else f"self_data={config.self_data}"
    writes = config.writes_its_data or config.self_data not in (0, *OWN_WINDOWS)
    options = [
        (config.must_distill, "distill", "leave it out"),
        (writes, own_text, "give a file of write_text as data="),
        (config.forward_loop is not None, "forward_loop", "give data_loader= or data="),
        *further,
    ]
    for is_set, option, instead in options:
        if is_set:
            problem = f"{option} runs the whole model, which streaming never holds"
            raise ValueError(f"{problem}: {instead}, or {IN_MEMORY} {verb}")


def _dtype(value: Any) -> Any:
    """The option dtype, a name as the torch.dtype. Raises ValueError for one that weights cannot be pruned in."""
    dtype = getattr(torch, value, value) if isinstance(value, str) else value
    if isinstance(dtype, torch.dtype) and dtype not in FLOATS:
        raise ValueError(f"dtype={shown(value)}: give one of {', '.join(map(str, FLOATS))}")
    return dtype


def _description_in(folder: Path) -> Description | None:
    return read_description(folder) if (folder / DESCRIPTION).is_file() else None


def _block_names(model: nn.Module, plan: Plan, verb: str) -> list[str]:
    """The module paths of all blocks, in the order of their shards."""
    if "" in plan.named_blocks:
        raise ValueError(f"{type(model).__name__} has no stack of blocks to stream one by one: {IN_MEMORY} {verb}")
    homes = plan.homes
    for layer_plan in plan.layers:
        layer = layer_plan.layer
        used_in = set().union(*(homes.get(module, {None}) for module in (layer.owner, *layer.tied_modules)))
        seen_in = set().union(*(homes.get(module, {None}) for module in layer.hooked_modules))
        if len(used_in) > 1 or (layer_plan.calibrated and (None in seen_in or len(seen_in) > 1)):
            raise ValueError(f"layer {layer.name!r} is not in one block: exclude it, or {IN_MEMORY} {verb}")
    return [*plan.named_blocks]


# the end --------------------------------------------------------------------------------------------------------------


def _finish(storage: Streamed, source: Path, work: WorkFolder, report: Report) -> None:
    """Write what is missing in ``folder``, all of it anew, and put it in the target's place."""
    work.write_json(REPORT, report.as_dict())
    storage.write_the_rest()
    model, folder = storage.model, work.path / "folder"
    masks = dict(named_masks(model))  # of layers outside of the blocks
    remove_masks(model)
    masks_outside = "masks/outside.safetensors"
    described = {name: of for index in sorted(work.done) for name, of in work.done[index].masks.items()}
    described |= write_masks(masks, work.path / masks_outside)
    shard = storage.saved(storage.outside(), masks_outside)
    work.check_files()
    report.notes += copy_companions(source, shard.parent)  # a stop may have left half of one in ``folder``
    for path in shard.parent.iterdir():
        if path != shard:
            shutil.rmtree(folder / path.name, ignore_errors=True)  # a folder, of chat templates
            path.replace(folder / path.name)
    first = work.place(shard, storage.shard_name(1))
    written = [first, *(record.files for record in work.done.values())]
    known = {Path(name).name: facts for files in written for name, facts in files.items()}
    concatenate(sorted((work.path / "masks").iterdir()), folder / MASKS)
    write_index(folder, sum(p.numel() for p in model.parameters()))
    (folder / DESCRIPTION).unlink(missing_ok=True)
    write_description(folder, description_of(dense_class(model).__name__, described, report), known)
    work.finish()
