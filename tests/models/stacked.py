"""Toy models of residual blocks on vectors, and what may stand between, before or inside of the blocks."""

from collections.abc import Callable, Iterable
from threading import Lock
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Stacked(nn.Module):
    """Residual blocks on vectors: [..., 16] -> [..., 16]. Subclasses say of which ``kind`` the blocks are, in what
    order they are run, and how one is called."""

    kind: type[nn.Module] = Block

    def __init__(self, blocks: int = 3, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([(block or self.kind)() for _ in range(blocks)])
        self.head = nn.Linear(16, 8)

    def order(self, x: Tensor) -> Iterable[nn.Module]:
        return self.blocks

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place, block in enumerate(self.order(x)):
            x = self.call(block, x, place)
        return self.head(x)


STACKED = ["blocks.0", "blocks.1", "blocks.2"]


def vectors(count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5 + index, 16, generator=generator) for index in range(count)]


class Unused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 16)


class Routed(Block):
    """One expert of two for each row, by the sign of its first entry; the second may be given nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        second = x[:, 0] > 0
        y = torch.zeros_like(x)
        y[~second] = self.experts[0](x[~second])
        y[second] = self.experts[1](x[second])
        return super().forward(x + y)


class Between(Stacked):
    """Adds something between the blocks, so that none gets just what the one before it gave."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return block(x + 0.5)


class PastHooks(Stacked):
    """Calls the forwards of its blocks, so that their hooks see nothing."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return block.forward(x)


class Activated(Stacked):
    """Applies a function between the blocks, that is no addition."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return block(x.relu())


class Rescaled(Stacked):
    """Adds to what the last block is given what depends on the block before it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        y = self.blocks[1](x)
        return self.head(self.blocks[2](y + x.mean()))


class AddedToSome(Stacked):
    """Large batches get features added in some rows behind the first block, as images do in Qwen3-VL."""

    def forward(self, x: Tensor) -> Tensor:
        features, x = x[::2] * 0.3, self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 0 and len(x) > 6:
                x = x.clone()
                x[::2] = x[::2] + features
        return self.head(x)


class WrittenBetween(Stacked):
    """Adds something to what a block gave, in place, and not to the last row."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        x[:-1] += 0.5
        return block(x)


class Twice(Stacked):
    """Runs through its blocks twice."""

    def order(self, x: Tensor) -> Iterable[nn.Module]:
        return [*self.blocks, *self.blocks]


class Writing(Block):
    """Writes its result to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(self.up(x).relu()))


class WritingFirst(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Writing()


class WritingLater(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Writing()


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 0.9 ** self.state["depth"])


class Counting(Stacked):
    """The blocks read a state that the model writes between them."""

    kind = Scaled

    def __init__(self) -> None:
        super().__init__()
        self.state = {"depth": 0}
        for block in self.blocks:
            block.state = self.state

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        self.state["depth"] = place
        return block(x)


class FromIterator(Block):
    def forward(self, x: Tensor, factors) -> Tensor:
        return super().forward(x * next(factors))


class Iterating(Stacked):
    """The blocks take their turn at an iterator."""

    kind = FromIterator

    def forward(self, x: Tensor) -> Tensor:
        x, factors = self.stem(x), iter([1.0, 0.8, 0.6])
        for block in self.blocks:
            x = block(x, factors)
        return self.head(x)


class Popping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.factors.pop())


class Exhausting(Stacked):
    """The blocks take their turn at a list that the model fills, and that is empty when they are run again."""

    kind = Popping

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[float] = []
        for block in self.blocks:
            block.factors = self.factors

    def forward(self, x: Tensor) -> Tensor:
        self.factors[:] = [0.6, 0.8, 1.0]
        return super().forward(x)


class OfShape(Block):
    """Depends on a size that it is given, so that a wrong one is seen."""

    def forward(self, x: Tensor, shape: torch.Size, sizes: list[torch.Size]) -> Tensor:
        assert isinstance(shape, torch.Size)
        return super().forward(x * (shape[0] + sizes[0].numel()) ** -0.5)


class Sized(Stacked):
    """The blocks are given the shape of what runs through them."""

    kind = OfShape

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return block(x, x.shape, sizes=[x.shape])


class Branches(Stacked):
    """Blocks side by side: each takes a slice of one tensor, as the mask decoder of SAM has it."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return block(x[:, place])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([self.stem(x), x, x * 2], 1)
        return self.head(torch.stack([self.call(block, x, place) for place, block in enumerate(self.blocks)]).sum(0))


class BranchesOfCopies(Branches):
    """Each takes a tensor that is made for it when its turn comes, as the neck of DPT has it."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return block(x[:, place].clone())


class WrittenBranches(Branches):
    """The slice of the second branch is written to by what the first one gave."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        output = block(x[:, place])
        x[:, min(place + 1, 2)] += output
        return output


class CountingBranches(Branches, Counting):
    """Side by side: each branch reads a state that the model writes before it."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        self.state["depth"] = (place + 1) % 3  # the last branch reads what is left standing
        return block(x[:, place])


class Normed(Stacked):
    """A norm stands between the blocks, which is no block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, nn.LayerNorm(16))
        self.blocks.insert(3, nn.LayerNorm(16))


class Prefixed(Stacked):
    """Puts a learned token before each sequence."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        prefix = torch.ones(x.shape[0], 1, 16)
        return super().forward(torch.cat([prefix, x], 1))


class Convolving(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.mix(x.mT).mT)


class Masked(Stacked):
    """With a mask beside its rows, which it does not look at."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class CrossBlock(nn.Module):
    """Reads memory, which has padding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.up(self.attention(x, memory, memory, need_weights=False)[0])


class CrossModel(Stacked):
    kind = CrossBlock

    def forward(self, x: Tensor, memory: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


class EncoderDecoder(CrossModel):
    """Memory is what an encoder gives, and its mask is the encoder's, as in transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.encoder = nn.ModuleList([Block(), Block()])

    def get_encoder(self) -> nn.Module:
        return self.encoder

    def forward(self, x, memory, attention_mask=None, decoder_attention_mask=None) -> Tensor:
        for block in self.encoder:
            memory = block(memory)
        return super().forward(x, memory)


class NanAtPadding(Stacked):
    """What stands at padding is NaN, as in attention over nothing."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(x.masked_fill(attention_mask[..., None] == 0, float("nan")))


class Nested(nn.Module):
    """Two stacks, one after the other, of which the second reads the first one's result in every block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.late = nn.ModuleList([Reader(), Reader()])  # module order is not the order of the calls
        self.early = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.early:
            memory = block(memory)
        for block in self.late:
            x = block(x, memory)
        return x


class Reader(Block):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x + self.read(memory))


class Interleaved(nn.Module):
    """Two stacks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.ModuleList([Block(), Block()])
        self.other = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for one, other in zip(self.one, self.other):
            x = other(one(x))
        return x


# what blocks and calls leave behind -----------------------------------------------------------------------------------


class AppendingBlock(Block):
    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:
        states.append(x)
        return super().forward(x * len(states) ** -0.5)


class Appending(Stacked):
    """The blocks append to a list that the model hands them, and take what stands before."""

    kind = AppendingBlock

    def forward(self, x: Tensor) -> Tensor:
        x, states = self.stem(x), []
        for block in self.blocks:
            x = block(x, states)
        return self.head(x)


class OfAttribute(Block):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Attributes(Stacked):
    """Sets an attribute on its blocks in each call, as models of images do with height and width."""

    kind = OfAttribute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.scale = len(x) ** -0.5
        return super().forward(x)


class Overwriting(Attributes):
    """Each call overwrites what its blocks take from the model, whatever its shape."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.scale = x.abs().mean()
        return Stacked.forward(self, x)


class Remembering(Attributes):
    """The first call that is under way sets what the blocks take; it is forgotten at the end of a call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.blocks[0].scale == 1.0:
            for block in self.blocks:
                block.scale = x.abs().mean()
        x = Stacked.forward(self, x)
        for block in self.blocks:
            block.scale = 1.0
        return x


class Handing(Stacked):
    """Each block leaves a number for the next one, where all calls leave theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = SimpleNamespace(scale=1.0)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0] * self.left.scale,))
            block.register_forward_hook(lambda *args: setattr(self.left, "scale", args[-1].abs().mean()))

    def forward(self, x: Tensor) -> Tensor:
        self.left.scale = 1.0
        return super().forward(x)


class PuttingOutObjects(Block):
    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(hidden=super().forward(x))


class OfObjects(Stacked):
    """Takes the hidden state out of what a block puts out."""

    kind = PuttingOutObjects

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return block(x).hidden


class CountedBlock(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x / self.calls)


class Calling(Stacked):
    """Each block counts its calls, and starts anew behind the last one of a call of the model."""

    kind = CountedBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.calls = 0
        return super().forward(x)


class Kept(Stacked):
    """Adds what it has kept of the call before, whichever that was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mean
        self.mean.lerp_(x.mean(0).detach(), 0.5)
        return super().forward(x)


class Shuffled(Stacked):
    """Large batches go through the blocks backwards."""

    def order(self, x: Tensor) -> Iterable[nn.Module]:
        return list(self.blocks)[::-1] if len(x) > 6 else self.blocks


class Locked(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)

    def __deepcopy__(self, memo: dict) -> "Locked":  # a lock has no copy
        copy = Locked()
        copy.load_state_dict(self.state_dict())
        return copy


class Autocast(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Inference(Stacked):
    forward = torch.inference_mode()(Stacked.forward)


class WithGradients(Stacked):
    forward = torch.enable_grad()(Stacked.forward)


# what they do not -----------------------------------------------------------------------------------------------------


class NoGrad(Stacked):
    forward = torch.no_grad()(Stacked.forward)


class Checkpointed(Stacked):
    """Runs its blocks behind torch's own frames."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Skipping(Stacked):
    """Small batches skip some blocks: those of five rows all but the second, those of six this one."""

    def order(self, x: Tensor) -> Iterable[nn.Module]:
        return [block for n, block in enumerate(self.blocks) if len(x) > 6 or (n == 1) == (len(x) == 5)]


class Swallowing(Stacked):
    """Goes on with what it has, whatever a block raises."""

    def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
        try:
            return block(x)
        except BaseException:
            return x * 2


class CalledLater(Stacked):
    """A layer of the first block is called once more, after all blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.blocks[0].down(x.repeat(1, 1, 2)))


class Confident(Stacked):
    """Blocks say by an attribute of their own whether the next one is called."""

    class kind(Block):
        is_sure = False

        def forward(self, x: Tensor) -> Tensor:
            self.is_sure = bool(x.mean() > 0)
            return super().forward(x)

    def order(self, x: Tensor) -> Iterable[nn.Module]:
        for block in self.blocks:
            yield block
            if block.is_sure:
                return


class Prepared(Stacked):
    """Blocks note in their first call that they have been called, which nobody reads."""

    class kind(Block):
        is_ready = False

        def forward(self, x: Tensor) -> Tensor:
            self.is_ready = True
            return super().forward(x)


class Deciding(nn.Module):
    """Each block says beside its output whether it is the last one, by what ``say`` makes of a bool."""

    def __init__(self, say: Callable[[bool], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.say, self.blocks = say, nn.ModuleList([self.Deciding(say) for _ in range(3)])

    class Deciding(Block):
        def __init__(self, say: Callable[[bool], object]) -> None:
            super().__init__()
            self.say = say

        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            return super().forward(x), self.say(bool(x.mean() > 0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, said = block(x)
            if said == self.say(True):
                break
        return x
