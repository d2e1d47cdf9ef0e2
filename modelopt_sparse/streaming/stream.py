"""Checkpoints larger than memory: read block by block, made sparse, written block by block.

The model is built without the weights of its blocks; embeddings, norms and heads are there. A block's weights are read
from the source's shards when it is run, and dropped when another block is. After its turn they are written to a shard
of the target, and from then on read from there. Everything between is `sparsify`, so the result is the same to the bit.

transformers' own offloading says where each weight lies, and converts those that are stored otherwise than they stand
in memory (fused experts); its save_pretrained converts them back, block by block.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from modelopt_sparse.calibration.batches import load_calls
from modelopt_sparse.calibration.run import take_in
from modelopt_sparse.calibration.turns import Turn, Turns
from modelopt_sparse.checkpoint import describe_mask, empty_model, model_class, unloaded, write_description
from modelopt_sparse.checkpoint import report as report_in
from modelopt_sparse.config import SparsifyConfig, resolve
from modelopt_sparse.diskspace import is_full
from modelopt_sparse.distributed import processes
from modelopt_sparse.format import DESCRIPTION, INDEX, MASKS, WEIGHTS, checked_path, pack_mask, weight_files
from modelopt_sparse.freed import give_back_freed_memory
from modelopt_sparse.modules import dense_class, named_masks, remove_masks
from modelopt_sparse.offload import taken_off
from modelopt_sparse.plan import Plan
from modelopt_sparse.planning import plan_for
from modelopt_sparse.quantized import Quantized, asked_for, dtype_of, kept_wide, load_dequantized
from modelopt_sparse.reconstruct import BlockReport
from modelopt_sparse.report import LayerReport, Report, attached_report, library_versions
from modelopt_sparse.sparsify import sparsify
from modelopt_sparse.streaming.shards import concatenate, write_index
from modelopt_sparse.streaming.source import SourceFiles
from modelopt_sparse.streaming.spill import spilled
from modelopt_sparse.streaming.workfolder import BlockRecord, WorkFolder, is_finished, remove_leftovers, work_path

NOT_COPIED = re.compile(r"\.(safetensors|bin|pth?|h5|msgpack|gguf|onnx|ot|pkl|pickle|ckpt)$|\.index\.json$|^sparsity\.")
ONE_FILE = 2**60  # a shard size that no block reaches
SHOWN = 5  # problems that an error spells out


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
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Report:
    """Make the checkpoint in a folder (or of a hub name) sparse and write it to a folder, without ever holding all of
    it; return the report.

    ``method``, ``config`` and keywords are those of `sparsify`, and so is the result, to the bit: the folder is what
    `save` writes, in one shard for each block. In memory are what is outside of the blocks, one block and its copy, its
    statistics, and the activations that are held from block to block (``spill``: in files beside the target instead).
    ``dtype``, ``revision`` and ``trust_remote_code`` are those of ``from_pretrained``. ``dequantize``: the checkpoint
    is quantized (fp8, mxfp4), and to be dequantized; without it such a one is refused.

    A run that was killed goes on from its last finished block when it is called again with the same arguments, and
    ends in the same bits. Called with other arguments, data or weights it raises ValueError, unless ``overwrite`` is
    set: then what is there is replaced. Raises ValueError before any work for what needs the whole model at once, and
    whenever a file of the source is missing, damaged, or another one than at the start; OSError on a full disk. The
    blocks that are done are kept then.
    """
    target = checked_path(target)
    if target.is_file():
        raise ValueError(f"{str(target)!r} is a file: a folder is written, give another path")
    if Path(source).is_dir() and target.resolve() == Path(source).resolve():
        raise ValueError(f"{str(target)!r} is the source: give another target")
    remove_leftovers(target)
    if target.exists() and not overwrite and not is_finished(target):
        raise ValueError(f"{str(target)!r} exists: give another target, or overwrite=True (--overwrite)")
    chosen, settings = resolve(method, config, options)
    _refuse_several_processes(settings)
    _refuse_whole_model(settings)
    remote: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    folder = local_folder(source, revision, remote)
    empty = empty_model(folder, **remote)
    quantized = asked_for(empty, folder, dtype, dequantize=dequantize)
    plan = plan_for(empty, chosen, settings)
    names = _block_names(empty, plan)
    files = SourceFiles(folder)
    with _saying_where_it_is_full(target):
        work = WorkFolder(target, _started_with(files, plan, settings, dtype, quantized), overwrite=overwrite)
    try:
        if work.finished:
            work.put_in_place()
            return report_in(target)
        with ExitStack() as stack:
            stack.enter_context(_saying_where_it_is_full(target))
            stack.enter_context(files.watched())
            built = _without_blocks(folder, names, dtype, quantized, work, remote)
            files.check_all()  # what lies outside of the blocks has been read
            blocks = _Blocks(built, work, files, spill=spill)
            stack.enter_context(blocks)
            report = _solved_before(work, blocks.model, plan, settings)
            if report is None:
                sparsify(blocks.model, method, config, turns=blocks, **options)
                report = attached_report(blocks.model)
                assert report is not None
                if quantized is not None:
                    report.notes.append(str(quantized))
                if work.resumed:
                    report.notes.append(f"{blocks.reused} of {len(names)} blocks were reused from a stopped run")
                work.write_json("report.json", report.as_dict())
            _finish(blocks, folder, work, report)
        return report
    finally:
        work.close()


@contextmanager
def _saying_where_it_is_full(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not is_full(error):
            raise
        raise OSError(
            f"{str(target)!r} could not be written, because the disk is full ({error}): free space and start the run "
            f"again with the same arguments; the blocks that are done are kept in {str(work_path(target))!r}"
        ) from error


# what cannot be streamed ----------------------------------------------------------------------------------------------


def _refuse_several_processes(config: SparsifyConfig) -> None:
    if (count := processes(config.distributed)) > 1:
        raise ValueError(
            f"checkpoints are streamed by one process, and this group has {count}: start one, or call it in one of "
            "them with distributed=False; models that fit into memory are made sparse by all of them with sparsify"
        )


def _refuse_whole_model(config: SparsifyConfig) -> None:
    if config.allocation != "uniform":
        raise ValueError(
            f"allocation={config.allocation!r} measures the whole dense model before any of it is pruned, which "
            "streaming never holds: give allocation='uniform' or rules, or load the model and call sparsify"
        )
    if config.forward_loop is not None:
        raise ValueError("forward_loop runs the whole model as often as it likes: give data_loader= or data= instead")


def _block_names(model: nn.Module, plan: Plan) -> list[str]:
    """The module paths of all blocks, in the order of their shards."""
    names = [name for stack in plan.stacks for name in stack.names]
    if "" in names:
        raise ValueError(
            f"{type(model).__name__} has no stack of blocks, and streaming goes block by block: load the model and "
            "call sparsify"
        )
    home = {module: name for name in names for module in model.get_submodule(name).modules()}
    for target in plan.layers:
        used_in = {home.get(module) for module in (target.layer.owner, *target.layer.twins)}
        seen_in = {home.get(module) for module in target.layer.observed}
        if len(used_in) > 1:
            raise ValueError(
                f"layer {target.name!r} is tied to {', '.join(sorted(str(name) for name in used_in))}, and streaming "
                "writes one block after the other: exclude it, or load the model and call sparsify"
            )
        if target.calibrated and (None in seen_in or len(seen_in) > 1):
            raise ValueError(
                f"layer {target.name!r} is not in one block, so its calibration takes a run of the whole model of its "
                "own: exclude it, or load the model and call sparsify"
            )
    return names


# what a run is started with -------------------------------------------------------------------------------------------


def _started_with(
    files: SourceFiles, plan: Plan, config: SparsifyConfig, dtype: Any, quantized: Quantized | None
) -> dict[str, Any]:
    """All that the result depends on, but for the calibration data, which is known when it has been read. The code of
    a method of the user's own is known by its name alone."""
    found: dict[str, Any] = {f"source file {name}": sha256 for name, sha256 in files.hashes.items()}
    for item in plan.layers:
        options = "".join(f" {key}={value!r}" for key, value in item.options.items())
        found[f"layer {item.name}"] = f"{item.recipe} {item.pattern}{options}"
    found.update(Report.begin(plan, config).settings)
    found.update(dtype=str(dtype), device=str(config.device))
    if quantized is not None:
        found["quantized source"] = str(quantized)
    for name, mask in (config.masks or {}).items():
        found[f"mask {name}"] = hashlib.sha256(pack_mask(mask).numpy().tobytes()).hexdigest()
    return found | {f"version of {name}": version for name, version in library_versions().items()}


def _solved_before(work: WorkFolder, model: nn.Module, plan: Plan, config: SparsifyConfig) -> Report | None:
    """The report of a run that was stopped after its last block. Layers outside of the blocks are not in any shard
    then, and are solved again."""
    given = work.read_report() if all(item.block is not None for item in plan.layers) else None
    if given is None:
        return None
    sha256 = None
    if any(item.calibrated for item in plan.layers):
        digest = hashlib.sha256()
        for call in load_calls(config, model):
            take_in(digest, call.args, call.kwargs)
        sha256 = digest.hexdigest()
    return Report.from_dict(given) if work.check_data(sha256) else None


# the model without its blocks -----------------------------------------------------------------------------------------


def local_folder(source: str | Path, revision: str | None, remote: Mapping[str, Any]) -> Path:
    """The folder of a checkpoint; that of a hub name is downloaded first, and stays in the cache."""
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise ValueError(f"{str(source)!r} holds no config.json: it is not a folder of a transformers model")
        return Path(source)
    name = str(source)
    try:
        config = cached_file(name, "config.json", revision=revision)
        index = cached_file(name, INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
        folder = Path(str(config)).parent
        for file in [WEIGHTS] if index is None else weight_files(folder):
            cached_file(name, file, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} is neither a folder nor a checkpoint that the hub gives: {error}") from None
    for loader in (AutoConfig, AutoTokenizer, AutoProcessor):
        try:
            loader.from_pretrained(name, revision=revision, **remote)  # its files are in the cache then
        except (OSError, ValueError, KeyError, ImportError):
            continue
    return folder


def _without_blocks(
    folder: Path,
    names: list[str],
    dtype: Any,
    quantized: Quantized | None,
    work: WorkFolder,
    remote: Mapping[str, Any],
) -> "tuple[PreTrainedModel, dict[str, nn.Module], dict[str, tuple[Path, str]]]":
    """The model with placeholders in the place of its blocks' parameters; the blocks by name; and (file, name in it)
    of each of those parameters."""
    config = AutoConfig.from_pretrained(folder, **remote)
    architecture = model_class(config, folder)
    devices = _devices(empty_model(folder, **remote), names)
    options = {"device_map": devices, "offload_folder": str(work.path / "converted"), **remote}
    with _quiet():
        if quantized is None:
            model, found = architecture.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
        else:
            model, found = load_dequantized(architecture, folder, config, quantized, **options)
    if problems := unloaded(found):
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        shown = "; ".join(problems[:SHOWN])
        raise ValueError(f"{str(folder)!r} does not hold a whole {type(model).__name__}: {shown}{more}")
    places = {name: (Path(at["safetensors_file"]), at["weight_name"]) for name, at in taken_off(model).items()}
    blocks = {name: model.get_submodule(name) for name in names}
    wide = kept_wide(model)
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and name in places:
            empty = _nothing(parameter.shape, dtype_of(name, wide, parameter.dtype))
            new.setdefault(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in new:  # a tie stays a tie
                setattr(module, key, new[parameter])
    return model, blocks, places


def _devices(model: nn.Module, names: list[str]) -> dict[str, str]:
    """A device map with the blocks on disk and everything else on the CPU."""
    found: dict[str, str] = {}

    def enter(module: nn.Module, path: str) -> None:
        prefix = f"{path}." if path else ""
        if path in names:
            found[path] = "disk"
        elif not any(name.startswith(prefix) for name in names):
            found[path] = "cpu"
        else:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found.update({f"{prefix}{key}": "cpu" for key, _ in own})
            for key, child in module.named_children():
                enter(child, f"{prefix}{key}")

    enter(model, "")
    return found


def _nothing(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape in the memory of one number: NaN, so that nothing takes it for a weight."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype).expand(shape)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, one for each block, and accelerate's remark that weights are offloaded."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    remarks = logging.getLogger("accelerate.big_modeling")
    level = remarks.level
    try:
        transformers.utils.logging.disable_progress_bar()
        remarks.setLevel(logging.ERROR)
        yield
    finally:
        remarks.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()


# the blocks -----------------------------------------------------------------------------------------------------------


class _Blocks(Turns):
    """The blocks of a model: one has its turn, or none; one more may be passing through a run of the whole model; the
    others hold placeholders. Entered, every block has its weights when it is called."""

    def __init__(
        self,
        built: "tuple[PreTrainedModel, dict[str, nn.Module], dict[str, tuple[Path, str]]]",
        work: WorkFolder,
        files: SourceFiles,
        *,
        spill: bool,
    ) -> None:
        self.model, blocks, self._places = built
        self._work, self._files, self._spill = work, files, spill
        self._blocks = list(blocks.values())
        self.names = list(blocks)
        self._home = {module: block for block in self._blocks for module in block.modules()}
        self._own = {block: _own_parameters(self.model, name, block) for name, block in blocks.items()}
        self._over: set[nn.Module] = set()
        self._open: nn.Module | None = None
        self._passing: nn.Module | None = None
        self._handles: list[Any] = []
        self.reused = 0
        self._load_what_is_shared()

    def __enter__(self) -> "_Blocks":
        for block in self._blocks:
            self._handles.append(block.register_forward_pre_hook(lambda module, _: self.load(module), prepend=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._let_pass(None)

    # Turns ------------------------------------------------------------------------------------------------------------

    def load(self, module: nn.Module) -> None:
        block = self._home.get(module)
        if block is not None and block is not self._open and block is not self._passing:
            self._let_pass(block)

    @contextmanager
    def turn(self, block: nn.Module | None, report: Report) -> Iterator[Turn]:
        self._work.check_data(report.calibration.get("sha256"))
        if block is None:
            yield Turn()
            return
        index = self._blocks.index(block)
        record = self._work.done.get(index)
        begun = len(report.layers), len(report.blocks)
        self.load(block)
        self._open, self._passing = block, None
        try:
            yield Turn() if record is None else _SolvedBefore(self, block)
            if record is None:
                self._write(index, report.layers[begun[0] :], report.blocks[begun[1] :])
            else:
                report.layers += [LayerReport.from_dict(layer) for layer in record.layers]
                report.blocks += [BlockReport(**tuned) for tuned in record.blocks]
                self.reused += 1
            self._over.add(block)
        finally:
            self._open = None
            self._drop(block)

    def keep(self, activations: Tensor) -> Tensor:
        return spilled(activations, self._work.path / "writing") if self._spill else activations

    def check_whole_runs(self, why: str) -> None:
        raise ValueError(f"{why}: streaming would read all of it once for each block; load the model and call sparsify")

    # reading ----------------------------------------------------------------------------------------------------------

    def _let_pass(self, block: nn.Module | None) -> None:
        if self._passing is not None:
            self._drop(self._passing)
        self._passing = None
        if block is not None:
            self._fill(block)
            self._passing = block

    @torch.no_grad()
    def _fill(self, block: nn.Module) -> None:
        for name, parameter in self._own[block].items():
            parameter.data = self._read(name, parameter)
        if block in self._over:
            self.fill_sparse(block)

    def _read(self, name: str, parameter: nn.Parameter) -> Tensor:
        file, key = self._places[name]
        self._files.check(file)
        with safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor(key).to(parameter.dtype)
        if tensor.shape != parameter.shape:
            raise ValueError(f"{name!r} has shape {list(tensor.shape)} in {file.name!r}, not {list(parameter.shape)}")
        return tensor

    @torch.no_grad()
    def fill_sparse(self, block: nn.Module) -> None:
        """Put what has been written of a block in the place of its dense weights, in the same memory."""
        index = self._blocks.index(block)
        named = f"named/{index:05d}.safetensors"
        files = self._work.done[index].files
        with safe_open(self._work.path / (named if named in files else self._shard(index)), framework="pt") as opened:
            for name, parameter in self._own[block].items():
                parameter.copy_(opened.get_tensor(name))

    def _drop(self, block: nn.Module) -> None:
        for parameter in self._own[block].values():
            parameter.data = _nothing(parameter.shape, parameter.dtype)
        give_back_freed_memory()

    def _load_what_is_shared(self) -> None:
        """Parameters that a block shares with others, or that lie outside: they stay."""
        own = {parameter for parameters in self._own.values() for parameter in parameters.values()}
        for name, parameter in self.model.named_parameters():
            if name in self._places and parameter not in own:
                parameter.data = self._read(name, parameter)

    # writing ----------------------------------------------------------------------------------------------------------

    def _shard(self, index: int) -> str:
        return f"folder/model-{index + 2:05d}-of-{len(self._blocks) + 1:05d}.safetensors"

    def _write(self, index: int, layers: list[LayerReport], tuned: list[BlockReport]) -> None:
        block, name, work = self._blocks[index], self.names[index], self._work
        masks = {f"{name}.{key}": mask for key, mask in named_masks(block)}
        remove_masks(block)
        own = set(self._own[block].values())
        state = {
            f"{name}.{key}": value.detach()
            for key, value in block.state_dict(keep_vars=True).items()
            if value in own or not isinstance(value, nn.Parameter)
        }
        files: dict[str, dict[str, Any]] = {}
        shard = self.saved(state)
        with safe_open(shard, framework="pt") as opened:
            converted = not set(self._own[block]) <= set(opened.keys())
        files[self._shard(index)] = work.place(shard, self._shard(index))
        if converted:
            file = work.scratch() / "named.safetensors"
            save_file({key: value.detach().contiguous() for key, value in self._own[block].items()}, file)
            files[f"named/{index:05d}.safetensors"] = work.place(file, f"named/{index:05d}.safetensors")
        file = work.scratch() / "masks.safetensors"
        save_file({key: pack_mask(mask) for key, mask in masks.items()}, file)
        files[f"masks/{index:05d}.safetensors"] = work.place(file, f"masks/{index:05d}.safetensors")
        described = {key: describe_mask(mask) for key, mask in masks.items()}
        parts = [asdict(layer) for layer in layers], [asdict(part) for part in tuned]
        work.finish_block(index, BlockRecord(name, files, described, *parts))

    def saved(self, state: Mapping[str, Tensor]) -> Path:
        """A file of these tensors as save_pretrained writes them, under the names that the checkpoint has."""
        folder = self._work.scratch()
        with _quiet():
            self.model.save_pretrained(folder, state_dict=dict(state), max_shard_size=ONE_FILE)
        return folder / WEIGHTS

    def write_the_rest(self) -> None:
        """Blocks that had no turn, because nothing in their stack is pruned."""
        for index, block in enumerate(self._blocks):
            if index not in self._work.done:
                self.load(block)
                self._write(index, [], [])

    def outside(self) -> dict[str, Tensor]:
        """The state dict without what the blocks' shards hold."""
        within = {f"{name}.{key}" for name, block in zip(self.names, self._blocks) for key in block.state_dict()}
        own = {parameter for parameters in self._own.values() for parameter in parameters.values()}
        stays = {name for name, p in self.model.named_parameters(remove_duplicate=False) if p not in own}
        return {name: value for name, value in self.model.state_dict().items() if name not in within or name in stays}


class _SolvedBefore(Turn):
    done = True

    def __init__(self, blocks: _Blocks, block: nn.Module) -> None:
        self._blocks, self._block = blocks, block

    def make_sparse(self) -> None:
        self._blocks.fill_sparse(self._block)


def _own_parameters(model: nn.Module, path: str, block: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that only this block holds, each under the first of its names."""
    inside = {f"{path}.{name}" for name, _ in block.named_parameters(remove_duplicate=False)}
    outside = {p for name, p in model.named_parameters(remove_duplicate=False) if name not in inside}
    return {f"{path}.{name}": p for name, p in block.named_parameters() if p not in outside}


# the end --------------------------------------------------------------------------------------------------------------


def _finish(blocks: _Blocks, source: Path, work: WorkFolder, report: Report) -> None:
    """Write what is missing in ``folder``, all of it anew, and put it in the target's place."""
    blocks.write_the_rest()
    model, folder = blocks.model, work.path / "folder"
    masks = dict(named_masks(model))  # of layers outside of the blocks
    cls = dense_class(model).__name__
    remove_masks(model)
    shard = blocks.saved(blocks.outside())
    work.check_files()
    known = {Path(name).name: found for record in work.done.values() for name, found in record.files.items()}
    first = f"model-{1:05d}-of-{len(blocks.names) + 1:05d}.safetensors"
    for path in shard.parent.iterdir():
        if path != shard:
            path.replace(folder / path.name)
    known[first] = work.place(shard, f"folder/{first}")
    file = work.scratch() / "masks.safetensors"
    save_file({name: pack_mask(mask) for name, mask in masks.items()}, file)
    concatenate([*sorted((work.path / "masks").iterdir()), file], folder / MASKS)
    write_index(folder, sum(p.numel() for p in model.parameters()))
    for path in source.iterdir():
        if path.is_file() and not NOT_COPIED.search(path.name) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    described = {name: of for index in sorted(work.done) for name, of in work.done[index].masks.items()}
    described |= {name: describe_mask(mask) for name, mask in masks.items()}
    (folder / DESCRIPTION).unlink(missing_ok=True)
    write_description(folder, cls, described, report, known=known)
    work.finish()
