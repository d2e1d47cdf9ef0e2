"""Where a folder may be written: not over files, unless the user says so, and never over what a model comes from."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from modelopt_sparse.checkpoint.format import checked_path

SOURCE = "sparsity_source"  # where a model holds the path of the folder that `restore` or `load` has read


def checked_place(folder: str | Path, *, overwrite: bool, sources: Iterable[str | Path]) -> Path:
    """The path of a folder to write to. ``sources``: paths, or names on the hub, that the weights are read from.

    Raises ValueError

    - for the name of a pickle file, and for a file;
    - for the current directory and the folders above it;
    - for a folder of ``sources``, under whatever name;
    - for a folder that is not empty, unless ``overwrite`` is True.
    """
    path = checked_path(folder)
    place = path.resolve()
    if place.exists() and not place.is_dir():
        raise ValueError(f"{str(path)!r} is a file: a folder is written, give another path")
    if Path.cwd().is_relative_to(place):
        what = "the current directory" if place == Path.cwd() else "a folder above the current directory"
        raise ValueError(f"{str(path)!r} is {what}: a model is written to a folder of its own, give another path")
    for source in sources:
        if place.exists() and Path(source).is_dir() and place.samefile(source):
            raise ValueError(
                f"{str(path)!r} is the folder that the weights come from, which would be lost: give another path"
            )
    if not overwrite and is_occupied(place):
        raise ValueError(f"{str(path)!r} exists and is not empty: give another path, or overwrite=True (--overwrite)")
    return path


def is_occupied(folder: Path) -> bool:
    """Whether a folder exists and is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def remember_source(model: nn.Module, folder: Path) -> None:
    """Note on a model the folder that its weights were read from."""
    setattr(model, SOURCE, str(folder.resolve()))


def sources_of(model: nn.Module) -> Iterator[str]:
    """Where a model's weights are known to come from: the folders that `restore` and `load` have read, and the paths
    and names on the hub that transformers notes on its models. Relative paths count from the current directory."""
    for module in model.modules():
        names = [module.__dict__.get(SOURCE)]
        if isinstance(module, PreTrainedModel):
            names += [module.name_or_path, getattr(module.config, "name_or_path", None)]
        yield from (name for name in names if name)
