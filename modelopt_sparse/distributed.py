"""What torch.distributed asks of the rest, and gives to it: the only file that imports it.

A `Team` is the processes that make one model sparse together. Everything they exchange begins with a header, in which
each says what it is about to do, or that it cannot go on: a process that fails is heard by the others when they come
to their next header, and one that dies is noticed there, so that nobody waits for what never comes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

if torch.distributed.is_available():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, distribute_tensor
else:  # builds of torch without distributed support have no sharded weights either, and no processes to talk to
    dist = None
    DTensor = distribute_tensor = None

TIMEOUT = timedelta(hours=1)  # how long a process waits for the others, which may be solving a large layer
END = "the end of the run"


def is_sharded(weight: Tensor) -> bool:
    """Whether this process holds a part of the weight only (fully_shard, tensor parallelism)."""
    return DTensor is not None and isinstance(weight, DTensor)


def mask_like(mask: Tensor, weight: Tensor) -> Tensor:
    """A full mask, placed the way a sharded ``weight`` is. Every rank holds the same full mask, so nothing is sent."""
    if DTensor is None or distribute_tensor is None:
        return mask
    if isinstance(mask, DTensor):  # tensor parallelism replicates buffers, over a part of the weight's mesh
        mask = mask.full_tensor()
    if not isinstance(weight, DTensor):
        return mask
    mask = mask.to(weight.device_mesh.device_type)
    # a weight that is offloaded between steps lies on another device than its mesh
    return distribute_tensor(mask, weight.device_mesh, weight.placements, src_data_rank=None).to(weight.device)


def processes(asked: bool | None) -> int:
    """How many processes work together where the option ``distributed`` is ``asked``.

    None: those of the default process group, if there is one; False: this one by itself; True: those of the group, and
    ValueError without one.
    """
    if asked not in (None, True, False):
        raise ValueError(f"distributed={asked!r}: must be True, False or None")
    ready = in_group()
    if asked and not ready:
        raise ValueError(
            "distributed=True needs a process group: start the program with torchrun and call "
            "torch.distributed.init_process_group() first, or leave distributed out"
        )
    return dist.get_world_size() if dist is not None and ready and asked is not False else 1


class RankError(RuntimeError):
    """Another process of the run stopped or died, or the processes do not do the same."""


class Team:
    """The processes of one run; this one is number ``rank`` of ``size``. Alone, nothing is sent and nothing waits.

    All of them call the same methods in the same order. `of` makes one. Whatever ends the run, `fail` and `close` are
    called, so that nobody waits for it.
    """

    def __init__(self, rank: int = 0, size: int = 1, headers: Any = None, values: Any = None) -> None:
        self.rank, self.size = rank, size
        self._headers, self._values = headers, values  # groups of their own: what fails here leaves the user's alone
        self._over = size == 1

    @classmethod
    def of(cls, asked: bool | None) -> "Team":
        """The team of one run; see `processes` for ``asked``. Raises RankError if not all processes come here."""
        size = processes(asked)
        if size == 1 or dist is None:
            return cls()
        text = None
        try:  # this waits for all processes
            return cls(dist.get_rank(), size, *(dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2)))
        except RuntimeError as error:
            text = str(error)
        raise RankError(
            f"not all of the {size} processes of the group have come to this call: make it in all of them, or with "
            f"distributed=False where one works by itself ({text})"
        )

    @contextmanager
    def heard(self) -> Iterator[None]:
        """What goes wrong in here is told to the others, and ends the run."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def meet(self, what: str, value: Any = None) -> list[Any]:
        """Wait for all -> the value that each process gives, by rank.

        Raises RankError if one of them has failed, has died, or is about to do something else than ``what``.
        """
        if self.size == 1:
            return [value]
        found = self._gathered(what, (what, None, value))
        failed = [f"rank {rank} stopped: {error}" for rank, (_, error, _) in enumerate(found) if error is not None]
        if failed:
            self._over = True
            raise RankError("; ".join(failed))
        if len({name for name, _, _ in found}) > 1:
            self._over = True
            doing = "; ".join(f"rank {rank}: {name}" for rank, (name, _, _) in enumerate(found))
            raise RankError(f"the processes of this run do not do the same ({doing}): give all of them the same call")
        return [value for _, _, value in found]

    def same(self, items: Mapping[str, Any], advice: str) -> None:
        """Raise ValueError, with ``advice``, unless every process gives the same items; named is the first that
        differs."""
        found = self.meet("a comparison of what all have to have in common", dict(items))
        for name in dict.fromkeys(name for given in found for name in given):
            values = [given.get(name, "nothing") for given in found]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise ValueError(
                        f"{name} is not the same in all processes: rank 0 has {values[0]}, rank {rank} has {value}; "
                        f"{advice}"
                    )

    def add_up(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Put in the place of each tensor, in all processes, its sum over them."""
        if self.size > 1:
            assert dist is not None
            kinds = self.meet(what, [tensor.device.type for tensor in tensors])
            with self._sending(what):
                for tensor, of_ranks in zip(tensors, zip(*kinds)):
                    self._through(tensor, of_ranks, dist.all_reduce)

    def give(self, what: str, tensors: Sequence[Tensor], source: int, value: Any = None) -> Any:
        """Put in the place of each tensor the one that rank ``source`` has -> the ``value`` that it has. Shapes and
        dtypes are the same in all."""
        found = self.meet(what, ([tensor.device.type for tensor in tensors], value))
        if self.size > 1:
            with self._sending(what):
                for tensor, of_ranks in zip(tensors, zip(*(kinds for kinds, _ in found))):
                    self._given(tensor, of_ranks, source)
        return found[source][1]

    def fail(self, error: BaseException) -> None:
        """This process cannot go on: say so where the others expect it at a header. Does nothing after a RankError,
        which all of them know of."""
        if self._over:
            return
        self._over = True
        if isinstance(error, Exception):  # on Ctrl-C nobody waits: the others notice that the connection is gone
            try:
                self._gathered("failing", ("failing", f"{type(error).__name__}: {error}", None))
            except RankError:
                return  # they are gone as well; what is to be raised is the error that is at hand

    def close(self) -> None:
        """Give the connections back; whoever still waits on them gets an error."""
        groups, self._headers, self._values = (self._headers, self._values), None, None
        for group in groups:
            if dist is not None and group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def end(self) -> None:
        """Wait until all have come to their end, so that none reports success while another fails."""
        self.meet(END)
        self._over = True

    def _gathered(self, what: str, header: tuple) -> list[Any]:
        assert dist is not None
        found: list[Any] = [None] * self.size
        with self._sending(what):
            dist.all_gather_object(found, header, group=self._headers)
        return found

    @contextmanager
    def _sending(self, what: str) -> Iterator[None]:
        """What goes wrong in here is the connection's fault, and leaves it useless: the others have to know."""
        text = None
        try:
            yield
        except torch.OutOfMemoryError:
            self._over = True
            raise
        except RuntimeError as error:
            text = " ".join(str(error).split())
        except BaseException:
            self._over = True
            raise
        if text is not None:  # raised out here, where no traceback holds on to the groups
            self._over = True
            self.close()
            late = "Timed out" in text
            waited = f"did not come within {TIMEOUT.total_seconds():g} seconds" if late else "died or left"
            raise RankError(
                f"another process of this run {waited}, as rank {self.rank} noticed at {what!r}; look at what the "
                f"others printed, and start all of them again ({text[:200]})"
            )

    def _given(self, tensor: Tensor, of_ranks: tuple[str, ...], source: int) -> None:
        assert dist is not None
        # as bytes: backends differ in the dtypes that they take
        raw = tensor if tensor.is_contiguous() else tensor.contiguous()
        raw = raw.detach().reshape(-1).view(torch.uint8)
        self._through(raw, of_ranks, partial(dist.broadcast, src=source))
        if raw.data_ptr() != tensor.data_ptr():
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def _through(self, tensor: Tensor, of_ranks: tuple[str, ...], send: Any) -> None:
        """Send through the default group where it has a backend of the tensor's device, which is that of all ranks,
        else through this team's, on the CPU."""
        if not tensor.numel():
            return
        if set(of_ranks) != {"cpu"} and len(set(of_ranks)) == 1 and _serves(tensor.device):
            send(tensor, group=None)
            return
        values = tensor.detach().to("cpu").contiguous()
        send(values, group=self._values)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)


@contextmanager
def while_others_wait(asked: bool | None) -> Iterator[bool]:
    """Work that one process does for all of them: it gets True, the others False and wait for its end at theirs.

    ``asked`` as for `processes`. Its error becomes a RankError in the others.
    """
    team = Team.of(asked)
    with team.heard():
        yield team.rank == 0
        team.end()
    team.close()


# programs that torchrun starts ----------------------------------------------------------------------------------------


@contextmanager
def launched_group() -> Iterator[None]:
    """The default group of the processes that torchrun has started, for a program that is no library. Without torchrun,
    or where there is just one process, nothing."""
    if dist is None or int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ or in_group():
        yield
        return
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_group() -> bool:
    """Whether there is a default group."""
    return dist is not None and dist.is_initialized()


def rank() -> int:
    """The number of this process in the default group; 0 without one."""
    return dist.get_rank() if dist is not None and in_group() else 0


def own_device(device: str) -> str:
    """The device of this process, where several of one machine are all given ``device``: "cuda" is a GPU for each."""
    if device != "cuda" or processes(None) == 1:
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def _serves(device: torch.device) -> bool:
    """Whether the default group has a backend for tensors of this device that does not copy them to the CPU."""
    assert dist is not None
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    return any(kind == device.type and backend != "gloo" for kind, _, backend in pairs)
