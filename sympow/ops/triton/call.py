"""One call of the kernels: how its tokens are laid out, how kernels are launched for it, and its states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton import knobs

from sympow.ops.triton import config, hopper_powers, hopper_states, states
from sympow.ops.triton.levels import Levels, level_count, levels_of, padded_key_dim
from sympow.ops.triton.rows import Rows, row_count, rows_of

WEIGH_BLOCK = 128
SUM_BLOCK, LONG_SUM_BLOCK = 1024, 4096  # of the gate's sums, within chunks and along whole rows
GATE_BLOCK, SHORT_GATE_BLOCK = 1024, 256  # of the gate's gradient, along whole rows and within chunks
STATE_BLOCK, STATE_PARTS = 2048, 8  # of a state: elements read at once, and programs that share it
LAST_PROGRAMS = 4  # of a multiprocessor, dealt out longest first


@dataclass(frozen=True)
class Tokens:
    """How tokens are laid out: B rows of T, or N documents packed along one row. Tables for packed documents are made
    on the device: a bound on the number of blocks is known without waiting for their lengths."""

    sequences: int
    length: int  # T
    tokens: int  # over all sequences
    cu_seqlens: Tensor | None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    def blocks(self, size: int) -> int:
        """Blocks of `size` over all sequences; for packed documents at most so many."""
        if self.packed:
            return self.tokens // size + self.sequences
        return self.sequences * config.ceil_div(self.length, size)

    def table(self, size: int) -> Tensor | None:
        """int32 [blocks, 2]: of each block its sequence and its place there. Past the last, places beyond its end."""
        if self.cu_seqlens is None:
            return None
        counts = (self.cu_seqlens.diff() + size - 1) // size
        ends = counts.cumsum(0)
        block = torch.arange(self.blocks(size), device=ends.device)
        n = torch.searchsorted(ends, block, right=True).clamp_(max=self.sequences - 1)
        return torch.stack([n, block - (ends - counts)[n]], 1).int()

    def chunk_starts(self, size: int) -> Tensor | None:
        if self.cu_seqlens is None:
            return None
        counts = (self.cu_seqlens.diff() + size - 1) // size
        return (counts.cumsum(0) - counts).int()


class Shapes:
    """What is known of a call before its kernels run: layout, launch configuration, and the rows of its states.

    gradient_rows: the rows are those that the gradients take, not those that are best for the output alone.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, p: int, chunk: int, gradient_rows: bool
    ):
        b, t, self.H, self.key_dim = q.shape
        self.K = padded_key_dim(self.key_dim)
        self.skip = self.K - self.key_dim  # of rows by levels alone; others are given a K that tiles hold
        self.G, self.V, self.p = k.shape[2], v.shape[3], p
        sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.layout = Tokens(sequences, t, b * t, cu_seqlens)
        self.columns = max(16, config.next_power_of_2(self.V))
        self.config = config.INTERPRETER if knobs.runtime.interpret else config.choose(self.K, self.columns, q.dtype)
        hopper = config.on_hopper(q.device) and q.dtype == torch.bfloat16
        self.hopper = hopper and p == 2 and self.K == self.V and self.K in config.HOPPER
        self.parts = 2
        if self.hopper:
            own = config.HOPPER[self.K]
            self.parts = own.gradient_parts if gradient_rows else own.parts
        self.leveled = hopper and (p, self.key_dim) in config.HOPPER_POWERS and self.V in (16, 32, 64)
        self.chunk = chunk
        if chunk:
            launches = self.config
            if self.hopper or self.leveled:
                launches = config.HOPPER[self.K] if self.hopper else config.HOPPER_POWERS[p, self.key_dim]
            multiple = launches.chunk_multiple
            self.chunk = config.ceil_div(chunk, multiple) * multiple
        # Short kernels of the quadratic form may begin before the last one ends. Between those of packed documents
        # stand others, which make their tables.
        self.overlap = self.hopper and not chunk and cu_seqlens is None
        self.quadratic = self.overlap and self.K in config.HOPPER_GRADIENTS  # by `hopper_quadratic`

    @cached_property
    def rows(self) -> Rows | Levels:
        """Of the chunked form alone: for a high p they are many."""
        return self.levels if self.leveled else rows_of(self.K, self.p, self.parts)

    @property
    def levels(self) -> Levels:
        """Of p = 3 and 4 on Hopper, in the chunked form."""
        return levels_of(self.key_dim, self.p)

    @property
    def hopper_launches(self) -> config.Config:
        if self.p > 2:
            return config.HOPPER_POWERS[self.p, self.key_dim] if self.chunk else config.POWERS
        if self.quadratic:
            return config.HOPPER_GRADIENTS[self.K]
        return (config.HOPPER if self.chunk else config.HOPPER_QUADRATIC)[self.K]

    @property
    def half(self) -> int:
        """Of plain rows."""
        return self.rows.half if self.chunk and isinstance(self.rows, Rows) else self.K

    def counts(self) -> tuple[int, int]:
        """Of plain rows, the lower and the upper prefixes."""
        return (self.rows.lower, self.rows.upper) if self.chunk and isinstance(self.rows, Rows) else (0, 0)

    @property
    def row_count(self) -> int:
        """`rows.count`, without the tables: they are not to be made where torch.compile only asks for shapes."""
        return level_count(self.key_dim, self.p) if self.leveled else row_count(self.K, self.p, self.parts)

    def state_shapes(self, z: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of S and Z at the boundaries of chunks, as `Call.states` returns them."""
        return self._shapes(self.layout.blocks(self.chunk), z)

    def end_shapes(self, z: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The same at the end of every sequence."""
        return self._shapes(self.layout.sequences, z)

    def _shapes(self, count: int, z: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # The pass on Hopper makes Z along the way.
        return (count, self.G, self.row_count, self.V), (count if z or self.hopper else 0, self.G, self.K, self.K)


class Call(Shapes):
    """What the passes of one call share: its shapes, its tensors as kernels take them, the sums of its gate."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, cu_seqlens: Tensor | None, p: int, scale: float,
        chunk: int, tf32: bool, gradient_rows: bool = False, sums: Tensor | None = None,
    ):  # fmt: skip
        """sums: of the gate, where another call with the same gate has formed them; log_g is not read then."""
        super().__init__(q, k, v, cu_seqlens, p, chunk, gradient_rows)
        self.gated = log_g is not None
        if self.skip:
            q, k = (pad(x, (self.skip, 0)) for x in (q, k))
        self.q, self.k, self.v = _flat(q), _flat(k), _flat(v)
        # For p > 4 scores are scaled as they are formed, to stay in range; else once, in the end.
        self.score_scale = scale if p > 4 else 1.0
        self.out_scale = 1.0 if p > 4 else scale**p
        self.grad_scale = p * (scale if p > 4 else 1.0)
        self.precision = "tf32" if tf32 else "ieee"
        # Of the quadratic form: where keys begin to count for a tile of queries, and queries end to for one of keys.
        self.begins = self.ends = None
        if sums is None:
            sums = q.new_empty(0, dtype=torch.float32) if log_g is None else self._gate_sums(log_g)
        self.sums = sums

    def _gate_sums(self, log_g: Tensor) -> Tensor:
        sums = torch.empty(self.G, self.layout.tokens, device=log_g.device, dtype=torch.float32)
        size = self.chunk or self.layout.length
        if not self.chunk and not self.layout.packed and size >= config.LEAST_REACH:
            tiles = self.layout.blocks(states.REACH_TILE.value)
            self.begins, self.ends = torch.empty(2, self.G, tiles, device=log_g.device, dtype=torch.int32)
        # Kept to the end of the call: a kernel that begins early may write before this one has read all, and must not
        # write to memory that a copy of log_g has left.
        self.log_g = log_g.float().contiguous()
        states.gate_sums[(self.layout.blocks(size), self.G)](
            self.log_g, sums, self.begins, self.ends, self.layout.cu_seqlens, self.layout.table(size),
            self.layout.length, self.layout.tokens, self.G, size, self._vanishing(),
            BLOCK=SUM_BLOCK if self.chunk else LONG_SUM_BLOCK, PACKED=self.layout.packed, OVERLAP=self.overlap,
        )  # fmt: skip
        return sums

    def _vanishing(self) -> float:
        """-log2 of a decay that is 0 to the passes, with room for roundings: those for Hopper know no subnormals."""
        return 127.0 if self.hopper or self.leveled else 150.0

    @property
    def restarts(self) -> bool:
        """Whether the gradient of the gate begins anew at every chunk. States for p > 2 may be too large to be held
        together with their gradients, and their chunks are long."""
        return self.gated and self.chunk > 0 and self.p <= 2

    def early(self, after: bool = True) -> dict:
        """Of a launch: whether it begins early, after another of this call."""
        return {"OVERLAP": True, "launch_pdl": True} if self.overlap and after else {"OVERLAP": False}

    def sequence_tables(self, size: int) -> tuple:
        chunk_starts = self.layout.chunk_starts(self.chunk) if self.chunk else None
        return (self.layout.cu_seqlens, chunk_starts, self.layout.table(size), self.layout.length, self.layout.tokens)

    def hopper_tables(self, launch: config.Launch, heads: int) -> tuple:
        """`sequence_tables` and `spread`."""
        return (*self.sequence_tables(launch.block), self.spread(launch, heads))

    def spread(self, launch: config.Launch, heads: int) -> int:
        """Of how many heads, of all sequences, the longest programs come first: as many as have LAST_PROGRAMS for every
        multiprocessor."""
        blocks = max(1, config.ceil_div(self.layout.length, launch.block))
        spread = config.ceil_div(LAST_PROGRAMS * config.processors(self.q.device), blocks)
        return min(spread, self.layout.sequences * heads)

    def dims(self) -> dict:
        dims = {"K": self.K, "V": self.V, "P": self.p, "HALF": self.half, "COLUMNS": self.columns}
        return dims | {"R": self.H // self.G, "CHUNK": self.chunk, "PRECISION": self.precision, "GATED": self.gated}

    def hopper_dims(self, launch: config.Launch) -> dict:
        dims = {"K": self.K, "V": self.V, "HALF": self.half, "PARTS": self.parts, "R": self.H // self.G}
        dims |= {"CHUNK": self.chunk}
        dims |= {"BLOCK": launch.block, "TILE": launch.tile, "STAGES": launch.stages, "num_warps": launch.warps}
        return dims | {"GATED": self.gated, "PACKED": self.layout.packed}

    def leveled_dims(self, launch: config.Launch) -> dict:
        """Of the gradient passes that take rows by levels."""
        group = config.slopes_group(self.K)
        per = max(1, launch.tile * 32 // max(32, self.V) // (group * self.K))
        dims = {"K": self.K, "V": self.V, "P": self.p, "ROWS": self.row_count, "GROUP": group, "PER": per}
        dims |= {"SKIP": self.skip}
        dims |= {"R": self.H // self.G, "BLOCK": launch.block, "CHUNK": self.chunk, "STAGES": launch.stages}
        return dims | {"GATED": self.gated, "PACKED": self.layout.packed, "num_warps": launch.warps}

    def slopes(self) -> tuple[Tensor, Tensor]:
        """rows and entries of `levels.Slopes`, on the device."""
        return self.levels.slopes_on(config.slopes_group(self.K), self.q.device)

    def own_channels(self, x: Tensor) -> Tensor:
        """x [..., K] without those that the call has filled up with zeros."""
        return x[..., self.skip :].contiguous() if self.skip else x

    def tables(self) -> tuple[Tensor | None, ...]:
        """Of the rows, on the device."""
        return self.rows.on(self.q.device) if self.chunk else (None,) * 4

    def new_ends(self, z: bool) -> tuple[Tensor, Tensor]:
        """Room for the last S [N, G, rows, V] and Z [N, G, K, K], float32."""
        s_end, z_end = (self.sums.new_empty(shape) for shape in self.end_shapes(z))
        return s_end, z_end

    def states(
        self, s_init: Tensor | None, z_init: Tensor | None, ends: tuple[Tensor, Tensor] | None, z: bool,
        gradient: tuple | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """S [chunks, G, rows, V] and Z [chunks, G, K, K] at the boundaries of chunks. `ends` takes the last ones.

        `gradient` is (dout, factor, delta): then the same in reverse, for the gradient of the states.
        """
        x, y = (self.k, self.v) if gradient is None else (self.q, gradient[0])
        heads = x.shape[2]
        layout, device, dtype = self.layout, x.device, x.dtype
        block = min(WEIGH_BLOCK, self.chunk)
        stride = (config.ceil_div(layout.tokens, block) + layout.sequences) * block
        per_head = 2 * self.K + 1 if self.p > 2 else self.K + 1
        xt = torch.empty(heads * per_head + 16, stride, device=device, dtype=dtype)  # tiles may read past the last row
        norm, delta = (None, None) if gradient is None else gradient[1:]
        flags: dict[str, int] = {"REVERSE": gradient is not None, "PACKED": layout.packed}
        states.weigh[(layout.blocks(block), heads)](
            x, x.stride(1), x.stride(2), self.sums, norm, delta, xt, layout.cu_seqlens, layout.table(block),
            layout.length, layout.tokens, stride, heads // self.G, self.out_scale,
            K=self.K, P=self.p, BLOCK=block, CHUNK=self.chunk, GATED=self.gated, **flags,
        )  # fmt: skip

        s, zs = (torch.empty(shape, device=device, dtype=dtype) for shape in self.state_shapes(z))
        sources = (x, x.stride(1), x.stride(2), xt, stride, y, y.stride(1), y.stride(2), self.sums, s, zs)
        flags |= {"INIT": s_init is not None, "FINAL": ends is not None, "ALIGN": block}
        inits = (s, zs) if s_init is None else (s_init, zs if z_init is None else z_init)
        s_final, z_final = (s, zs) if ends is None else ends
        sequences = (layout.cu_seqlens, layout.chunk_starts(self.chunk), layout.length, layout.tokens, self.G)
        dims = self.dims() | {"R": heads // self.G}
        if self.hopper:
            launch = self.hopper_launches.state
            tiles, count = self._state_tiles(launch)
            dims = {name: dims[name] for name in ("K", "V", "HALF", "R", "CHUNK", "GATED")}
            hopper_states.state_pass[count, self.G, layout.sequences](
                *sources, *inits, s_final, z_final, *sequences, **dims, **flags, PARTS=self.parts, TILES=tiles,
                WIDTH=launch.tile, STEP=launch.step, STAGES=launch.stages, num_warps=launch.warps,
            )  # fmt: skip
        elif self.leveled:
            launch = self.hopper_launches.state
            tiles = min(launch.block, 128 // self.V)
            count = hopper_powers.programs(self.levels.shape, tiles, launch.warps)
            dims = {name: dims[name] for name in ("K", "V", "P", "R", "CHUNK", "GATED")}
            hopper_powers.state_pass[count, self.G, layout.sequences](
                xt, stride, *sources[5:9], self.tables()[0], s, inits[0], s_final, *sequences, **dims, **flags,
                LEVELS=self.levels.shape, TILES=tiles, STEP=launch.step, STAGES=launch.stages, num_warps=launch.warps,
            )  # fmt: skip
        else:
            launch, narrow, least = self.config.state, self.K - self.half, 64  # rows of a product
            lower, upper = self.counts()
            tiles = int(z) + config.ceil_div(lower, launch.block * max(1, least // self.K))
            if upper:
                tiles += config.ceil_div(upper, launch.block * max(1, least // narrow))
            states.state_pass[tiles, self.G, layout.sequences](
                *sources, *inits, s_final, z_final, self.tables()[0], *sequences, lower, upper, **dims, **flags,
                TILES=launch.block, STEP=launch.step, Z=z, **launch.options,
            )  # fmt: skip
        return s, zs

    def _state_tiles(self, launch: config.Launch) -> tuple[int, int]:
        """Tiles of rows that a program of the state pass owns, and programs a head: half the tiles where the programs
        would be fewer than two a multiprocessor, which fill each other's waits."""
        counts = {
            tiles: hopper_states.programs(self.K, self.half, self.parts, tiles, launch.tile, launch.warps)
            for tiles in (launch.block, 2)
        }
        few = counts[launch.block] * self.G * self.layout.sequences < 2 * config.processors(self.q.device)
        tiles = 2 if few else launch.block
        return tiles, counts[tiles]


def _flat(x: Tensor) -> Tensor:
    """Batch and time as one axis need stride(0) = T stride(1); rows of channels lie together, at multiples of 32
    bytes."""
    fits = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    if fits and x.data_ptr() % 16 == 0 and (x.is_contiguous() or (x.stride(1) % 16 == 0 and x.stride(2) % 16 == 0)):
        return x
    return x.clone(memory_format=torch.contiguous_format)
