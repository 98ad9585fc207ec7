"""FLOPs and state size of power, softmax, linear and window attention, and FLOPs of convolutions, in plain numbers.

These conventions hold for all functions below:
- A multiply-add is 2 FLOPs. Only matrix products count (the decay of a gated state, convolutions); the masked half of a
  causal product does not count, nor do exponentials, row sums and the forming of phi.
- Pairs (i, j), j <= i, are in two products forward, q . k of width K and the sum of v of width V, and in
  five backward, where the scores are formed again: K + V and 3K + 2V multiply-adds a pair and query head.
- A token and a state [D, V + 1] (the normalizer is a column) are in two products forward, phi(q) S and phi(k)
  v, and in five backward: the update again, and the gradients of phi(q), S, phi(k) and v.

Letters as in docs/math.md: T time, H query heads, G key/value heads, K key dim, V value dim, D state dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from sympow.ops.feature_map import spow_dim, tpow_dim

# ------------------------------------------------------------------------------------------------- state


def power_state(
    key_dim: int, value_dim: int, p: int, *, kv_heads: int = 1, normalizer: bool = True, basis: str = "spow"
) -> int:
    """Returns the number of elements of the state of power attention: G D (V + 1), or G D V without the normalizer.

    basis: "spow" (M7) or "tpow" (M6). Linear attention is p = 1.
    """
    if basis not in ("spow", "tpow"):
        raise ValueError(f"basis must be 'spow' or 'tpow', got {basis!r}")
    dim = spow_dim(key_dim, p) if basis == "spow" else tpow_dim(key_dim, p)
    return kv_heads * dim * (value_dim + normalizer)


def softmax_state(context: int, key_dim: int, value_dim: int, *, kv_heads: int = 1, window: int | None = None) -> int:
    """Counts the elements of the key/value cache after `context` tokens.

    They are G (K + V) a token, of the last `window` tokens if given.
    """
    _check(context=context, key_dim=key_dim, value_dim=value_dim, kv_heads=kv_heads, window=window)
    return kv_heads * (key_dim + value_dim) * min(context, window or context)


# ------------------------------------------------------------------------------------------------- FLOPs


def attention_pairs(time: int, window: int | None = None) -> int:
    """Returns the number of pairs (i, j) with j <= i of a sequence, and i - j < window if given."""
    _check(time=time, window=window)
    full = min(time, window or time)
    return full * (full + 1) // 2 + (time - full) * full


def power_flops(
    time: int,
    key_dim: int,
    value_dim: int,
    p: int,
    chunk: int | None = None,
    gated: bool = False,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    backward: bool = False,
) -> int:
    """Counts the FLOPs of power attention over one sequence of `time` tokens, from an empty state.

    chunk: tokens of a chunk (M11); None, or `time` and more, is the quadratic form. n = ceil(T / c) chunks
    cost, with c tokens in each but the last, which has r:
    - within chunks, per query head: 2 (K + V) a pair, c (c + 1) / 2 pairs a chunk;
    - queries against the state, per query head: 2 D (V + 1) for the T - c tokens after the first chunk;
    - updates, per key/value head: 2 D (V + 1) for the T - r tokens before the last chunk;
    - gated, per key/value head: D (V + 1) for the decay of the state at each of the n - 1 boundaries.
    backward: the backward pass instead: 2 (3K + 2V) a pair, two products a query, three a key, and four
    times the decay.
    """
    _check(time=time, key_dim=key_dim, value_dim=value_dim, p=p, chunk=chunk, heads=heads, kv_heads=kv_heads)
    chunk = min(chunk or time, time)
    whole, rest = time // chunk, time % chunk  # torch.compile does not trace divmod of symbolic sizes
    boundaries = whole - (rest == 0)
    last = rest or chunk
    pairs = whole * attention_pairs(chunk) + (attention_pairs(rest) if rest else 0)
    element = power_state(key_dim, value_dim, p)
    queries, keys = heads * (time - chunk), kv_heads * (time - last)
    decay = kv_heads * boundaries * element if gated else 0
    if backward:
        return 2 * heads * pairs * (3 * key_dim + 2 * value_dim) + 2 * element * (2 * queries + 3 * keys) + 4 * decay
    return 2 * heads * pairs * (key_dim + value_dim) + 2 * element * (queries + keys) + decay


def least_power_flops(
    time: int, key_dim: int, value_dim: int, p: int, gated: bool = False, *, heads: int = 1, kv_heads: int = 1
) -> int:
    """Returns `power_flops`, forward and backward, with the best chunk: a power of two, or `time`."""
    chunks = [time, *(1 << i for i in range(time.bit_length()))]
    sizes = {"heads": heads, "kv_heads": kv_heads}
    return min(
        sum(power_flops(time, key_dim, value_dim, p, chunk, gated, **sizes, backward=b) for b in (False, True))
        for chunk in chunks
    )


def softmax_flops(
    time: int, key_dim: int, value_dim: int, *, window: int | None = None, heads: int = 1, backward: bool = False
) -> int:
    """Counts the FLOPs of causal softmax attention over one sequence; of the last `window` tokens if given.

    2 (K + V) a pair and query head forward, 2 (3K + 2V) backward.
    """
    _check(key_dim=key_dim, value_dim=value_dim, heads=heads)
    width = 3 * key_dim + 2 * value_dim if backward else key_dim + value_dim
    return 2 * heads * attention_pairs(time, window) * width


def convolution_flops(time: int, taps: int, channels: int = 1) -> int:
    """Counts the FLOPs of causal convolutions of one sequence with a filter a channel, forward and backward.

    The cheaper of two forms counts. Tap by tap, 2 a tap and token forward, and twice as many backward. By six real
    Fourier transforms of n, the next power of two from time + taps - 1 on: of the signal, the filter and the result
    forward, and of three gradients backward, 2.5 n log2(n) each, and three products of n / 2 complex numbers, 6 each.
    """
    _check(time=time, taps=taps, channels=channels)
    taps = min(taps, time)
    levels = (time + taps - 2).bit_length()
    return channels * min(6 * attention_pairs(time, taps), (1 << levels) * (15 * levels + 9))


# ------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class ModelShape:
    """Holds the sizes of a model that its costs depend on.

    Attributes:
        mlp_ratio: hidden width over d_model of an MLP of two matrices.
        other_weights: elements of a block's matrices other than those of queries, keys, values and outputs; None: the
            elements of that MLP.
    """

    d_model: int
    n_layers: int
    n_heads: int
    key_dim: int
    value_dim: int
    n_kv_heads: int
    mlp_ratio: int = 4
    other_weights: int | None = None

    def __post_init__(self) -> None:
        _check(**{name: value for name, value in vars(self).items() if name != "other_weights"})
        if self.other_weights is not None and self.other_weights < 0:
            raise ValueError(f"other_weights must not be negative, got {self.other_weights}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}")

    @classmethod
    def of(cls, d_model: int, n_layers: int, n_heads: int) -> ModelShape:
        """Returns the plain shape: heads of width d_model / n_heads, keys and values of their own for every head."""
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got {d_model} and {n_heads}")
        return cls(d_model, n_layers, n_heads, d_model // n_heads, d_model // n_heads, n_heads)

    @property
    def block_weights(self) -> int:
        """Returns the number of elements of the weight matrices of all blocks, 12 d**2 a block in the plain shape.

        Without embedding and head, biases, norms and gates.
        """
        queries, keys = self.n_heads * self.key_dim, self.n_kv_heads * self.key_dim
        outs, values = self.n_heads * self.value_dim, self.n_kv_heads * self.value_dim
        others = 2 * self.mlp_ratio * self.d_model**2 if self.other_weights is None else self.other_weights
        return self.n_layers * (self.d_model * (queries + keys + values + outs) + others)


def weight_state_flop_ratio(
    shape: ModelShape, context: int, *, p: int | None = None, window: int | None = None, chunk: int = 128
) -> float:
    """Returns the weight-state FLOP ratio [SCRA section 3.2].

    The ratio is the FLOPs of training for the weights, divided by the FLOPs of training for the state.

    FLOPs a token, forward and backward:
    - weights: 6 an element of `block_weights` (2 forward, 4 backward);
    - softmax attention (p and window None): context / 2 pairs a token, 2 (K + V) + 2 (3K + 2V) a pair and
      query head;
    - window attention: as softmax attention at a context of min(context, window). The source counts it so;
      a long sequence costs up to twice that, since its windows are full (`softmax_flops` counts them);
    - power attention, linear attention with p = 1: 2 D V for each of 3 products a query head and 4 a
      key/value head, and chunk / 2 pairs within chunks. Every token is counted as reading a state.
    Normalizers are not counted.

    The source does not spell its definition out. This one gives its Table 2 (124M GPT-2) when values below 10
    are rounded to whole numbers and values above to multiples of 5, as `format_ratio` does: softmax attention
    7.71, 1:1.04, 1:8.3, 1:126.6 at 1,024, 8,192, 65,536, 1,000,000 tokens; linear attention 30.9.
    """
    if p is not None and window is not None:
        raise ValueError(f"p and window exclude each other, got p={p} and window={window}")
    _check(context=context, window=window, chunk=chunk)
    heads, kv_heads, key_dim, value_dim = shape.n_heads, shape.n_kv_heads, shape.key_dim, shape.value_dim
    pair = 2 * heads * (4 * key_dim + 3 * value_dim)
    if p is None:
        state_flops = pair * min(context, window or context) / 2
    else:
        products = 2 * power_state(key_dim, value_dim, p, normalizer=False)
        state_flops = products * (3 * heads + 4 * kv_heads) + pair * chunk / 2
    return 6 * shape.block_weights / (shape.n_layers * state_flops)


def format_ratio(ratio: float) -> str:
    """Returns a ratio as [SCRA Table 2] prints it, "8:1" or "1:125": whole below 10, then in multiples of 5."""
    if ratio <= 0:
        raise ValueError(f"a ratio is positive, got {ratio}")
    larger = max(ratio, 1 / ratio)
    printed = round(larger) if larger < 9.5 else 5 * round(larger / 5)
    return f"{printed:,}:1" if ratio >= 1 else f"1:{printed:,}"


def format_bytes(count: int) -> str:
    """Returns a number of bytes in decimal units, "39 MB" or "2.2 TB"."""
    units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(units) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {units[unit]}" if size < 9.95 and unit > 0 else f"{size:,.0f} {units[unit]}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, "1 token" or "2,048 tokens"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _check(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
