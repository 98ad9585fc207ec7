"""Makes the tables of docs whose lines are the rows of one file of results, and names the function of each file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from statistics import median

from benchmarks.pages.context_tables import MODELS
from benchmarks.pages.learning_tables import learning_table
from benchmarks.pages.mqar_tables import (
    convolutions_table,
    deep_table,
    equal_state_table,
    heads_table,
    seeds_table,
    steps_table,
    tasks_table,
    widths_table,
)
from benchmarks.pages.prose import table
from benchmarks.pages.serving_tables import load_table, serving_table

LONG_TEXT_FROM = 32_768  # the first end of a range of positions in the table of long text


def measured_on(rows: Sequence[dict]) -> str:
    """Returns the processor, the version of torch, and the commits of all rows."""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return f"{rows[0]['processor']}; torch {rows[0]['torch']}, commit {commits}"


def titled(heading: str, lines: Iterable[Sequence[object]], rows: Sequence[dict], about: str = "",
           left: Collection[int] = (0,)) -> str:  # fmt: skip
    """Returns `prose.table`, and a sentence below it: what the rows are about, and where they were measured."""
    return f"{table(heading, lines, left)}\n\n{'; '.join(filter(None, [about, measured_on(rows)]))}."


def ops_table(rows: list[dict]) -> str:
    """Returns a row for each length, forward and backward side by side."""
    lines = []
    for time in sorted({row["T"] for row in rows}):
        modes = {row["mode"]: row for row in rows if row["T"] == time}
        cells = [f"{time:,}"]
        for mode in ("forward", "forward+backward"):
            row = modes[mode]
            cells += [f"{row['ms']:,.0f}", f"{row['peer_ms']:,.0f}", f"{row['ratio']:.1f}x"]
        lines.append([*cells, f"{modes['forward+backward']['extra_mb']:,.0f}"])
    row = rows[0]
    about = f"B {row['B']}, H {row['H']}, K = V = {row['K']}, p {row['p']}, gated, {row['dtype']}"
    heading = "T | forward, ms | torch, ms | ratio | forward + backward, ms | torch, ms | ratio | extra memory, MB"
    return titled(heading, lines, rows, about)


def host_table(rows: list[dict]) -> str:
    """Returns a row for each call: the time until it returns, ours and the peer's."""
    lines = []
    for row in rows:
        cells = [row["what"], row["B"], f"{row['T']:,}", f"{row['us']:,.0f}", f"{row['peer_us']:,.0f}"]
        lines.append([*cells, f"{row['peer_us'] / row['us']:.2f}x"])
    row = rows[0]
    about = f"H {row['H']}, K = V = {row['K']}, p {row['p']}, gated, {row['dtype']}, eager unless it says compiled"
    return titled("what | B | T | us | peer, us | ratio", lines, rows, about)


def positions_table(rows: list[dict]) -> str:
    """Returns a row for each form of the gradient of positions."""
    lines = [[row["form"], f"{row['worst_error']:.3f}", f"{row['step_ms']:.1f}"] for row in rows]
    return titled("gradient | largest error of a layer | ms", lines, rows, "bfloat16")


def decoding_table(rows: list[dict]) -> str:
    """Returns a row for each mixer and context."""
    lines = []
    for row in rows:
        cells = [row["mixer"], f"{row['context']:,}", f"{row['ms_per_token']:.2f}", f"{row['state_bytes']:,}"]
        lines.append([*cells, "" if row["forward_ms"] is None else f"{row['forward_ms']:,.0f}"])
    return titled("mixer | context | ms a token | state, bytes | forward of the context, ms", lines, rows)


def gpu_table(rows: list[dict]) -> str:
    """Returns a row for each shape, the peers side by side as ratios."""
    peers = list(dict.fromkeys(row["peer"] for row in rows if "linear" not in row["peer"]))
    shapes: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        sizes = (row[name] for name in ("p", "K", "B", "H", "G"))
        key = (*sizes, "yes" if row["gated"] else "no", f"{row['T']:,}", row["mode"])
        shapes.setdefault(key, {})[row["peer"]] = row
    lines = []
    for key, found in shapes.items():
        ratios = [f"{found[peer]['ratio']:.2f}x" if peer in found else "" for peer in peers]
        ours = next(iter(found.values()))
        memory = "" if ours["extra_mb"] is None else f"{ours['extra_mb']:,.0f}"
        lines.append([*key, f"{ours['ms']:.2f}", *ratios, memory])
    about = f"{rows[0]['dtype']}; up to T = 4,096 as CUDA graphs"
    measured = sorted({row["cold_start_s"] for row in rows if row["cold_start_s"]})
    if measured:
        cold = " to ".join(f"{seconds:.1f}" for seconds in dict.fromkeys((measured[0], measured[-1])))
        about += f"; a first forward and backward, with nothing compiled before: {cold} s"
    heading = " | ".join(["p | K = V | B | H | G | gate | T | mode | ms", *peers, "extra memory, MB"])
    return titled(heading, lines, rows, about, left=(5, 7))


def delta_table(rows: list[dict]) -> str:
    """Returns a row for each shape of the delta rule, beside softmax attention and power attention without the rule."""
    lines = []
    for row in rows:
        cells = [*(row[name] for name in ("K", "B", "H", "G")), f"{row['T']:,}", row["mode"], f"{row['ms']:.2f}"]
        cells += [f"{row['ratio']:.2f}x", f"{row['ms'] / row['power_ms']:.2f}"]
        lines.append(
            cells + ["" if row[name] is None else f"{row[name]:,.0f}" for name in ("extra_mb", "power_extra_mb")]
        )
    heading = (
        f"K = V | B | H | G | T | mode | ms | {rows[0]['peer']} | times the time of p = 2 | extra memory, MB | of p = 2"
    )
    return titled(heading, lines, rows, f"p {rows[0]['p']}, gated, {rows[0]['dtype']}", left=(5,))


def delta_steps_table(rows: list[dict]) -> str:
    """Returns a row for each shape of a step of the delta rule, beside plain torch and a pass over the state."""
    lines = []
    for row in rows:
        cells = [*(row[name] for name in ("p", "K", "V", "B", "H", "G")), f"{row['us']:,.1f}"]
        lines.append([*cells, f"{row['plain_us']:,.0f}", f"{row['pass_us']:,.1f}", f"{row['share_of_pass']:.0%}"])
    heading = "p | K | V | B | H | G | us a token | plain torch, us"
    heading += " | one pass over the state, us | share of a step that a pass takes"
    return titled(heading, lines, rows, f"gated, {rows[0]['dtype']}, state float32, as CUDA graphs", left=())


def decoding_gpu_table(rows: list[dict]) -> str:
    """Returns a row for each step."""
    lines = []
    for row in rows:
        heads = f"H {row['H']}, G {row['G']}, K = V = {row['K']}"
        cells = [heads, row["state_dtype"] + (", in slots" if row["slotted"] else ""), row["B"]]
        cells += [f"{row['ms_per_token'] * 1e3:,.1f}", f"{row['gb_per_s']:,}", f"{row['share_of_copy']:.0%}"]
        cells += ["", ""] if row["peer"] is None else [f"{row['peer_ms'] * 1e3:,.1f}", f"{row['ratio']:.1f}x"]
        lines.append(cells)
    softmax = ", ".join(dict.fromkeys(row["peer"] for row in rows if row["peer"]))
    about = f"p {rows[0]['p']}, gated, {rows[0]['dtype']}, as CUDA graphs; softmax: {softmax}"
    heading = "heads, K | state | B | us a token | state, GB/s | share of a copy | softmax over 65,536, us | ratio"
    return titled(heading, lines, rows, about, left=(0, 1))


def brumby_table(rows: list[dict]) -> str:
    """Returns a row for each number of sequences that are decoded, and for each length of a text that is read."""
    lines = []
    for row in rows:
        reads = row["what"] == "reading"
        what = f"reading {row['tokens']:,} tokens" if reads else f"decoding, {row['rows']} sequences"
        cells = [what.replace("1 sequences", "1 sequence"), f"{row['ms_per_token']:.2f}", f"{row['tokens_per_s']:,.0f}"]
        if reads:
            cells += ["", "", ""]
        else:
            cells += [f"{row['least_bytes'] / 1e9:.2f}", f"{row['gb_per_s']:,}", f"{row['share_of_floor']:.0%}"]
        lines.append([*cells, "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}"])
    row = rows[0]
    copies = dict.fromkeys(f"{row['copy_gb_per_s']:,}" for row in rows if row["what"] == "decoding")
    about = f"{row['parameters']:,} parameters in {row['dtype']}, states in float32; a copy at {', '.join(copies)} GB/s"
    heading = " | ms a token | tokens/s | least GB a step | GB/s | share of a copy | peak of memory, GB"
    return titled(heading, lines, rows, about)


def decoding_models_table(rows: list[dict]) -> str:
    """Returns a row for each mixer and number of sequences, with the dtypes side by side."""
    cases: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["mixer"], row["rows"]), {})[row["dtype"]] = row
    lines = []
    for (mixer, batch), found in cases.items():
        cells = [mixer, f"{batch}"]
        for dtype in ("bfloat16", "float32"):
            row = found[dtype]
            cells += [f"{row['ms_per_token']:.3f}", f"{row['tokens_per_s']:,.0f}", f"{row['share_of_floor']:.0%}"]
        lines.append(cells)
    row = rows[0]
    copies = dict.fromkeys(f"{row['copy_gb_per_s']:,}" for row in rows)
    about = f"preset {row['preset']!r}, {row['vocabulary']:,} tokens; a copy at {', '.join(copies)} GB/s"
    each = "ms a token | tokens/s | of a copy"
    return titled(f"mixer | sequences | bfloat16: {each} | float32: {each}", lines, rows, about)


def speculation_table(rows: list[dict]) -> str:
    """Returns a row for each kind of prompts, temperature and drafts."""
    lines = []
    for row in rows:
        cells = [row["text"], f"{row['temperature']:g}", row["drafts"], f"{row['plain_tokens_per_second']:,.0f}"]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['ratio']:.2f}x"]
        cells += [f"{row['accepted']:,} of {row['proposed']:,}", f"{row['distinct']:.2f}"]
        lines.append([*cells, f"{row['same_tokens']} of {row['prompts']}"])
    row = rows[0]
    about = f"{row['model']}, {row['prompt_tokens']} tokens read, {row['new_tokens']} written"
    heading = "prompts | temperature | drafts | tokens/s | with drafts | ratio | accepted | distinct | same"
    return titled(heading, lines, rows, about, left=(0, 2))


def damage_table(rows: list[dict]) -> str:
    """Returns a row for the killed writers and for the damaged files."""
    killed, spoilt = rows
    lines = [["the writer was killed", killed["kills"], f"{killed['whole_files']} held a whole context"],
             ["spoilt", spoilt["files"], f"{spoilt['refused']} were refused in one line"]]  # fmt: skip
    return titled(" | files | ", lines, rows, left=(0, 2))


def rounding_table(rows: list[dict]) -> str:
    """Returns a row for each dtype of a file."""
    lines = []
    for row in rows:
        more = "0, bit-equal" if row["bit_equal"] else f"{row['more_loss_percent']:+.4f}%"
        lines.append([row["dtype"], f"{row['bytes']:,}", f"{row['loss']:.5f}", more])
    lines.append(["no file, the last token alone", "", f"{rows[0]['loss_after_one_token']:.5f}", ""])
    return titled("dtype | bytes | loss | more than without a file", lines, rows)


def restore_table(rows: list[dict]) -> str:
    """Returns a row for each number of tokens read."""
    lines = []
    for row in rows:
        cells = [f"{row['tokens_read']:,}", f"{row['read_seconds']:,.1f}", f"{row['bytes']:,}"]
        lines.append([*cells, f"{1e3 * row['restore_seconds']:.1f}", "yes" if row["same_continuation"] else "no"])
    heading = "tokens read | reading, s | file, bytes | restoring, ms | same continuation"
    return titled(heading, lines, rows, left=(4,))


def chunks_table(rows: list[dict]) -> str:
    """Returns a row for each p, K and mode, with a column for each context: the fastest choice, and the time of "auto"
    over that. Below, the form that "auto" should take is timed by its name, and "auto" is compared with it."""
    times = sorted({row["T"] for row in rows})
    choices, calls, lines = [], [], []
    for p, width, mode in sorted({(row["p"], row["K"], row["mode"]) for row in rows}):
        cells = [p, width, mode]
        for time in times:
            here = (p, width, mode, time)
            same = [x for x in rows if (x["p"], x["K"], x["mode"], x["T"]) == here and x["ratio"] is not None]
            best = min((x for x in same if x["impl"] != "auto"), key=lambda x: x["ms"], default=None)
            auto = next((x for x in same if x["impl"] == "auto"), None)
            form = "" if best is None else "quadratic" if best["chunk"] >= time else f"{best['chunk']:,}"
            cells.append(form if auto is None else f"{form}, {auto['ratio']:.2f}x")
            for named in same:
                if best and auto and named["impl"] != "auto" and named["chunk"] == auto["chunk"]:
                    choices.append(named["ms"] / best["ms"])
                    calls.append(auto["ms"] / named["ms"])
        lines.append(cells)
    row = rows[0]
    heading = " | ".join(["p | K = V | mode", *(f"T {time:,}" for time in times)])
    shown = table(heading, lines, left=range(2, 3 + len(times)))
    about = f"H {row['H']}, {'gated' if row['gated'] else 'no gate'}, {row['dtype']}, {measured_on(rows)}."
    if choices:
        about += (
            f' The form "auto" takes, by name: at most {max(choices):.3f} times the fastest. "auto" takes '
            f"{min(calls):.3f} to {max(calls):.3f} times the time of that form, median {median(calls):.3f}."
        )
    return f"{shown}\n\n{about}"


def training_table(rows: list[dict]) -> str:
    """Returns a row for each context, mixer and way to run it."""
    lines = []
    for row in rows:
        ratios = ["" if row[name] in (None, 1) else f"{row[name]:.2f}x" for name in ("ratio", "speedup")]
        mixer = f"{row['mixer']}, Muon" if row.get("optimizer") == "muon" else row["mixer"]
        cells = [f"{row['context']:,} x {row['rows']}", row["ranks"], mixer, row["mode"], f"{row['ms']:.1f}"]
        cells += [f"{row['tokens_per_second']:,}", f"{row['mfu']:.1%}", f"{row['peak_gib']:.1f}"]
        lines.append([*cells, *ratios])
    row = rows[0]
    about = f"preset {row['preset']!r}, a vocabulary of {row['vocabulary']:,}, {row['precision']}"
    heading = ("tokens x rows | GPUs | mixer | run | ms a step | tokens/s | MFU | peak, GiB | rate times softmax | "
               "times one GPU")  # fmt: skip
    return titled(heading, lines, rows, about, left=(0, 2, 3))


def ranks_table(rows: list[dict]) -> str:
    """Returns a row for each comparison of two runs."""
    lines = []
    for row in rows:
        steps, losses = (f"{row['first_step']} to {row['steps']}", f"{row['first_loss']:.3f} to {row['last_loss']:.3f}")
        lines.append([row["run"], row["against"], steps, losses, f"{row['difference']:.1e}", f"{row['allowed']:.0e}"])
    return titled("run | against | steps | losses | largest difference | allowed", lines, rows, left=range(4))


def long_row_table(rows: list[dict]) -> str:
    """Returns losses by tenths of the row."""
    (row,) = rows
    heading = " | ".join(f"{10 * i}-{10 * (i + 1)}%" for i in range(len(row["tenths"])))
    about = f"{row['length']:,} tokens forward and backward in {row['seconds']:.1f} s, {row['peak_gib']} GiB"
    about += f"; last tenth less the one before {row['rise_at_the_end']:+.4f} ± {row['standard_error']:.4f}"
    return titled(heading, [[f"{loss:.4f}" for loss in row["tenths"]]], rows, about, left=())


def long_text_table(rows: list[dict]) -> str:
    """Returns losses by position, and the gain from the far context, a row for each model and range of positions."""
    lines = []
    for row in rows:
        if row["end"] < LONG_TEXT_FROM:
            continue
        cells = [MODELS.get(row["variant"], row["variant"]), f"{row['start']:,} to {row['end'] - 1:,}"]
        cells += ["" if row[name] is None else f"{row[name]:.4f}" for name in ("loss", "loss_in_rows", "loss_late")]
        half = "" if row["gain_half"] is None else f" ± {row['gain_half']:.4f}"
        lines.append([*cells, "" if row["gain"] is None else f"{row['gain']:+.4f}{half}"])
    row = rows[0]
    about = (f"one run each, {row['tokens']:,} tokens of training in rows of {row['trained_context']:,}; "
             f"{row['documents']} held-out texts of {row['length']:,} tokens")  # fmt: skip
    heading = "model | positions | loss | in rows, late | whole, late | gain from the far context"
    return titled(heading, lines, rows, about, left=(0, 1))


def hf_generate_table(rows: list[dict]) -> str:
    """Returns a row for each dtype and batch: the rate in transformers, and its share of that of sympow."""
    lines = []
    for row in rows:
        rate, loop = row["tokens_per_second"], row["tokens_per_second_of_the_loop_alone"]
        share = f"{rate / row['tokens_per_second_sympow']:.0%}" + ("" if row["equal"] else ", DIFFERENT tokens")
        lines.append([row["dtype"], row["batch"], f"{rate:,.0f}", share, f"{loop:,.0f}"])
    about = f"{rows[0]['new_tokens']} greedy tokens behind 128, preset {rows[0]['model']!r}"
    heading = "dtype | rows | tokens/s in transformers | of `sympow generate` | its loop with an empty model"
    return titled(heading, lines, rows, about)


def state_dtype_table(rows: list[dict]) -> str:
    """Returns a row for each dtype of the sums: the bytes of a state, and the loss beside that of float32."""
    lines = []
    for row in rows:
        losses = [f"{row['loss']:.4f}", f"{row['more']:+.3%}", f"{row['more_in_last_tenth']:+.3%}"]
        lines.append([row["state_dtype"], f"{row['state_bytes'] / 1e6:,.2f}", *losses])
    about = (f"{rows[0]['model']}, the first {rows[0]['tokens']:,} held-out tokens as one sequence, rounded every "
             f"{rows[0]['tokens_a_fold']} tokens")  # fmt: skip
    heading = "sums | MB of a sequence | loss, nats | more than in float32 | more in the last tenth"
    return titled(heading, lines, rows, about)


TABLES = {
    "ops_cpu.csv": ops_table,
    "ops_h200.csv": gpu_table,
    "delta_gpu.csv": delta_table,
    "delta_steps_gpu.csv": delta_steps_table,
    "positions_h200.csv": positions_table,
    "host_h200.csv": host_table,
    "decoding_cpu.csv": decoding_table,
    "decoding_h200.csv": decoding_gpu_table,
    "decoding_models_h200.csv": decoding_models_table,
    "brumby_gpu.csv": brumby_table,
    "speculation_cpu.csv": speculation_table,
    "context_rounding_cpu.csv": rounding_table,
    "context_restore_cpu.csv": restore_table,
    "context_damage_cpu.csv": damage_table,
    "chunks_h200.csv": chunks_table,
    "chunks_no_gate_h200.csv": chunks_table,
    "mqar_hybrids_h200.csv": seeds_table,
    "mqar_hybrids_mixed_gpu.csv": seeds_table,
    "mqar_deep_gpu.csv": deep_table,
    "mqar_pairs_gpu.csv": seeds_table,
    "mqar_lengths_h200.csv": convolutions_table,
    "mqar_equal_state_h200.csv": equal_state_table,
    "mqar_far_h200.csv": seeds_table,
    "mqar_windows_cpu.csv": seeds_table,
    "mqar_offset_cpu.csv": steps_table,
    "mqar_bits_cpu.csv": tasks_table,
    "mqar_stacked_cpu.csv": seeds_table,
    "learning.csv": learning_table,
    "mqar_heads_h200.csv": heads_table,
    "mqar_widths_h200.csv": widths_table,
    "training_h200.csv": training_table,
    "training_optimizers_gpu.csv": training_table,
    "training_ranks_h200.csv": ranks_table,
    "training_ranks_text_h200.csv": ranks_table,
    "training_ranks_recipe_h200.csv": ranks_table,
    "training_ranks_learning_h200.csv": ranks_table,
    "long_row_h200.csv": long_row_table,
    "long_text_gpu.csv": long_text_table,
    "hf_generate_h200.csv": hf_generate_table,
    "state_dtype_cpu.csv": state_dtype_table,
    "state_dtype_gpu.csv": state_dtype_table,
    "serving_cpu.csv": serving_table,
    "serving_h200.csv": serving_table,
    "serving_load_cpu.csv": load_table,
    "serving_memory_cpu.csv": serving_table,
}
