"""The README's table and docs/results.md, written from the committed result files alone.

python benchmarks/render_results.py          # rewrite them
python benchmarks/render_results.py --check  # exit 1 when they and the results differ
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import expert_tables  # beside this file
from result_files import RESULTS, load, machine, table

from multirate.methods.spec import PLAIN, find
from multirate.named_models import NAMED

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- {}: benchmarks/render_results.py -->", "<!-- /{} -->"
"""Around each part of the README that is written here, by its name."""
REAL = "smollm2"
TITLES = {REAL: "SmolLM2-135M-Instruct"}
ROWS = {
    "generate": "`transformers` generate",
    "generate-static": "`transformers` generate, static cache and compile",
    "generate-lookup": "`transformers` generate, its own prompt lookup (10 tokens)",
    "generate-early-exit": "`transformers` generate, its own early exit (7 of 30 layers draft)",
    "generate-assistant": "`transformers` generate, `smollm2-draft` as its assistant",
    "llamacpp-bf16": "llama.cpp, BF16",
    "llamacpp-q8_0": "llama.cpp, Q8_0",
    "llamacpp-q4_0": "llama.cpp, Q4_0",
    "llamacpp-bf16-lookup": "llama.cpp, BF16, its prompt lookup (2 tokens)",
    "llamacpp-q8_0-lookup": "llama.cpp, Q8_0, its prompt lookup (2 tokens)",
    "llamacpp-q4_0-lookup": "llama.cpp, Q4_0, its prompt lookup (2 tokens)",
}
"""Rows that are no methods of ours; what follows a space in a row's name is kept."""


PUBLISHED = {
    "eagle:lookup=sam": "2.73x (SAM-Decoding joined to EAGLE-2)",
    "eagle": "2.10x; with the trees of EAGLE-2 2.36x",
    "eagle3": "3.02x (13B; its paper has 5.58x)",
    "token_recycling": "2.22x",
    "token_recycling:lookup=sam": "–",
    "hydra": "2.07x",
    "medusa": "1.71x",
    "kangaroo": "up to 1.68x (its paper)",
    "prompt_lookup": "1.66x",
    "two_model:draft=smollm2-draft": "1.52x",
    "lookahead": "1.34x",
    "layerskip": "1.80x (Llama-3.2-1B whose training was made for it)",
    "sam": "–",
    "sam:texts=smollm2": "1.62x to 2.36x (REST's own paper, 7B, code and text)",
    "m2r2": "up to 2.8x (its abstract, MT-Bench)",
    "m2r2-carry:lookup=0": "ours",
    "m2r2-carry": "ours",
}
ORDER_DIFFERS = """\
Why the order differs. On a GPU a pass over sixty rows takes as long as one over one, so that wide
trees are free: EAGLE-2, Medusa, Hydra and token recycling live on that. Here eight rows cost 1.1
to 1.5 plain steps, by the machine's state, sixteen 1.6 and more and sixty more than five
([experiments](experiments.md)), so that drafts have eleven nodes at most, and token recycling loses
most. A level of a draft costs 2% to 5% of a plain step of so small a model, whose head of 49,152
tokens alone is a fifth of it. A model of
135M repeats itself more than one of 7B, which is what look-ups live on. And accelerators were
trained for five minutes of a GPU, or for six hours of a core and six minutes of a GPU, on some
50,000 answers; EAGLE's own on 68,000 rounds of conversations."""


RIVALS = ("llamacpp", "generate-lookup", "generate-early-exit", "generate-assistant")
"""How the names of rows begin that `--rivals` adds."""
OWN = ":staged=0"
STAGES = (
    "In stages a narrow copy verifies drafts, and the model's own weights then verify its tokens, "
    "and a draft behind them, in one pass: tokens per step are of these passes "
    "(docs/methods/m2r2.md). `staged=0`: each draft is verified by the model's own."
)


def accelerators(model: str) -> dict[str, dict[str, Any]]:
    """The descriptions of the accelerators in the package for a named model, by method."""
    folder = NAMED[model].accelerators
    assert folder is not None
    paths = sorted(folder.glob("*/accelerator.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def display_name(model: str, method: str) -> str:
    """A method's title, with the size of its accelerator and the settings in its name."""
    first, _, rest = method.partition(" ")
    if first in ROWS:
        return f"{ROWS[first]} {rest}".rstrip()
    name, *settings = method.split(":")
    title = f"`{name}`: {find(name).title}"
    about = accelerators(model).get(name)
    if about is not None:
        title += f", {about['parameters'] / 1e6:.1f}M parameters"
    return title + "".join(f", `{setting}`" for setting in settings)


def method_table(model: str, data: dict[str, Any]) -> str:
    """A line for each method: in stages, beside what it does where each draft is verified by the
    model's own weights (`staged=0`).
    """
    rows = {row["method"]: row for row in data["rows"]}
    lines = []
    for name, row in rows.items():
        if name.endswith(OWN) and name.removesuffix(OWN) in rows:
            continue
        own = rows.get(name + OWN)
        runs = [row] if own is None else [row, own]
        steps = runs[-1]["tokens_per_step"]
        same = f"{sum(run['identical'] for run in runs)} of {len(runs) * data['prompts']}"
        if not row["lossless"]:
            same += ", its own arithmetic"
        for kind in ("near_ties", "diverged"):
            if count := sum(run[kind] for run in runs):
                same += f", {count} {kind.replace('_', '-')}"
        lines.append(
            (
                display_name(model, name),
                f"{row['tokens_per_second']:.0f}",
                _times(row["speedup"]),
                "–" if own is None else _times(own["speedup"]),
                "–" if steps is None else f"{steps:.2f}",
                same,
            )
        )
    heads = "method", "tokens/s", "speedup", "`staged=0`", "tokens per step", "identical"
    return table(heads, lines)


def _times(speedup: float | None) -> str:
    return "–" if speedup is None else f"{speedup:.2f}x"


def loop_table(shapes: list[dict[str, Any]]) -> str:
    heads = (
        "shape (random weights)",
        "generate",
        "our plain loop",
        "share of read bandwidth",
        "6 rows",
        "8 rows",
        "second stream",
    )
    lines = []
    for s in shapes:
        rows = s["rows_cost"]
        lines.append(
            (
                s["shape"],
                f"{s['generate_tokens_per_second']:.0f} tok/s",
                f"{s['our_tokens_per_second']:.0f} tok/s ({s['speedup_over_generate']:.1f}x)",
                f"{100 * s['share_of_roof']:.0f}%",
                f"{rows['6']:.2f}",
                f"{rows['8']:.2f}",
                f"{100 * (s['second_stream_cost'] - 1):+.0f}%",
            )
        )
    return table(heads, lines)


def training(model: str) -> str:
    """What each of a model's accelerators was trained for, from their own descriptions."""
    trained = {name: about["training"] for name, about in accelerators(model).items()}
    lines = []
    for name, run in trained.items():
        runs = [*run.get("before", []), run]
        steps, tokens, seconds = (
            sum(one[key] for one in runs) for key in ("steps", "tokens", "seconds")
        )
        lines.append(
            f"`{name}` {steps} steps, {tokens / 1e6:.1f}M tokens, {seconds / 60:.0f} minutes"
        )
    return ", ".join(lines)


def setting(model: str, bench: dict[str, Any]) -> str:
    """What was run, where and when."""
    return (
        f"MT-Bench questions, {TITLES[model]}, {bench['dtype']}, batch 1, greedy, "
        f"{bench['max_new_tokens']} new tokens at most, {bench['prompts']} prompts"
        f"{_of_loops(bench)}, {bench['threads']} threads of an {machine(bench)}, "
        f"{str(bench.get('date', ''))[:10]}."
    )


def reproduce(model: str, bench: dict[str, Any]) -> str:
    argv = bench["argv"]
    given = [
        argv[argv.index(name) :][:2] for name in ("--limit", "-n", "--repeats") if name in argv
    ]
    options = " ".join(" ".join(pair) for pair in given)
    options += " --leave-out-loops" if "--leave-out-loops" in argv else ""
    own = [argv[at + 1] for at, word in enumerate(argv) if word == "-a"]
    options += "".join(f" -a {accelerator}" for accelerator in own)
    rivals = (" --rivals " + argv[argv.index("--rivals") + 1]) if "--rivals" in argv else ""
    theirs = [row["method"] for row in bench["rows"] if row["method"].startswith(RIVALS)]
    methods = ",".join(row["method"] for row in bench["rows"] if row["method"] not in theirs)
    return (
        f"Reproduce with `multirate bench {model} --suite mt_bench --data question.jsonl "
        f"--methods {methods}{rivals} {options} --json out.json`."
    )


def readme() -> dict[str, list[str]]:
    """The README's parts by name."""
    bench = load(f"mt_bench_{REAL}.json")
    return {
        "results": [
            setting(REAL, bench),
            method_table(REAL, bench),
            "Reproduce with [`bash lab/recipes/smollm2/lossless.sh EVAL runs/lossless mt_bench`]"
            "(lab/recipes/smollm2/lossless.sh), where EVAL holds the questions "
            "(and ACCELERATORS what [`on_a_gpu.sh`](lab/recipes/smollm2/on_a_gpu.sh) "
            "trained, for EAGLE-3 and Hydra). "
            "Everything else that was measured is in [docs/results.md](docs/results.md).",
        ],
        "suites": [speeds_table(SUMMARY_ROWS, columns_of(SUMMARY))],
        "eight": [speeds_table((*JOINED, *JOINED_OWN), columns_of(EIGHT))],
        "dynamic": [frontier_table(load(f"margin_long_{REAL}.json")["frontier"])],
    }


SUMMARY = {
    "mt_bench_smollm2": "the table above",
    "suite_mt_bench_all": "MT-Bench, all of it",
    "suite_spec_bench": "Spec-Bench",
    "suite_gsm8k": "GSM8K",
    "suite_humaneval": "HumanEval",
    "suite_t1": "MT-Bench, temperature 1",
    "suite_b4": "MT-Bench, batches of 4",
}
JOINED = ("sam", "eagle:lookup=sam", "eagle3:lookup=sam", "m2r2-carry")
"""The fastest methods, each joined to what the text said before."""
JOINED_OWN = tuple(f"{name}{OWN}" for name in JOINED)
SUMMARY_ROWS = (
    "prompt_lookup",
    "token_recycling:lookup=sam",
    "kangaroo:lookup=sam",
    *JOINED,
    *JOINED_OWN,
    "eagle:staged=0",
    "eagle3:staged=0",
    "m2r2-carry:lookup=0:staged=0",
)
EIGHT = {
    "eight_mt_bench": "MT-Bench, all of it",
    "eight_spec_bench": "Spec-Bench",
    "eight_gsm8k": "GSM8K",
    "eight_humaneval": "HumanEval",
    "eight_t1": "MT-Bench, temperature 1",
}


def columns_of(titles: dict[str, str]) -> dict[str, dict[str, float]]:
    """The speedups of the runs that are named, by their titles. Batches do not go in stages,
    whatever a row says.
    """
    columns = {}
    for name, title in titles.items():
        run = load(f"{name}.json")
        speeds = {row["method"]: row["speedup"] for row in run["rows"]}
        if run.get("batch", 1) > 1:
            speeds = {f"{method}{OWN}": speed for method, speed in speeds.items()}
        columns[f"{title} ({run['prompts']})"] = speeds
    return columns


def speeds_table(methods: Sequence[str], columns: dict[str, dict[str, float]]) -> str:
    """A line for each method, the speedups of a run a column; the best of each in bold."""
    best = {
        title: max((speeds[name] for name in methods if speeds.get(name)), default=None)
        for title, speeds in columns.items()
    }
    lines = []
    for name in methods:
        cells = []
        for title, speeds in columns.items():
            text = _times(speeds.get(name))
            wins = name in speeds and speeds[name] == best[title]
            cells.append(f"**{text}**" if wins else text)
        lines.append((f"`{name}`", *cells))
    return table(("method", *columns), lines)


def suites_section() -> list[str]:
    """The other suites, and sampling: the speedups of all methods on each."""
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("suite_*.json"))]
    if not runs:
        return []
    return [
        "### Other suites, and sampling",
        f"Speedup over our plain loop, one pass, {runs[0]['threads']} threads. At a temperature "
        f"every method draws the same text for a seed. {STAGES} Batches do not go in stages.",
        *suites_tables(runs),
        *categories_tables(
            [run for run in runs if "temperature" not in run and run.get("batch", 1) == 1]
        ),
        *eight_bits_section(),
        *published_section(),
    ]


def eight_bits_section() -> list[str]:
    """The fastest rows with a narrow copy that is as large as most models'."""
    return [
        "### With a narrow copy of 8 bits",
        "SmolLM2's weights here come from a file of 4 bits a weight, so that its narrow copy has 4 "
        "bits, too, and is all but exact. A model that is saved in bf16 has a copy of 8 bits, "
        "which saves less; here SmolLM2 has one (`MULTIRATE_NARROW_BITS=8`), everything else being "
        "as above.",
        *suites_tables([load(f"{name}.json") for name in EIGHT]),
        "Reproduce with `bash lab/recipes/smollm2/lossless.sh EVAL runs/lossless eight_bits`.",
    ]


def suites_tables(runs: list[dict[str, Any]]) -> list[str]:
    """The speedups of all methods, a run a column, and what the runs were."""
    columns, about = {}, []
    for run in runs:
        drawn = f", temperature {run['temperature']:g}" if "temperature" in run else ""
        batch = f", batch {run['batch']}" if run.get("batch", 1) > 1 else ""
        title = f"{run['suite']}{drawn}{batch}{_of_loops(run)}"
        ours = [row for row in run["rows"] if row["method"] not in ROWS]
        columns[title] = {row["method"]: row["speedup"] for row in ours}
        same = sum(row["identical"] for row in ours)
        plain = next(row for row in ours if row["method"] == PLAIN)
        about.append(
            (
                title,
                str(run["prompts"]),
                str(run["max_new_tokens"]),
                f"{plain['tokens_per_second']:.0f}",
                f"{same} of {run['prompts'] * len(ours)}",
                machine(run),
                str(run["date"])[:10],
            )
        )
    heads = "suite", "prompts", "new tokens", "plain tokens/s", "identical", "processor", "date"
    return [speeds_table(_methods_of(runs), columns), table(heads, about)]


def _of_loops(run: dict[str, Any]) -> str:
    """How many answers were not counted, where they were looked at."""
    loops = run.get("loops")
    if not loops:
        return ""
    return f", without {len(loops)} of {run['prompts'] + len(loops)} answers that run into loops"


def _methods_of(runs: list[dict[str, Any]]) -> list[str]:
    """Our rows of all runs, the plain one first."""
    names = dict.fromkeys(row["method"] for run in runs for row in run["rows"])
    return [name for name in names if name not in ROWS]


def rivals_section() -> list[str]:
    """What others make of the same drafts."""
    bench = load("rivals_smollm2.json")
    return [
        "### As others run it",
        f"{setting(REAL, bench)} Transformers' assisted generation with its own settings, and "
        "llama.cpp's Python package plainly and with the drafts that it has, in the same run, "
        "prompt by prompt. Theirs count the pass over the prompt among the tokens per step; ours "
        "are in stages, whose steps are passes of the model's own weights.",
        method_table(REAL, bench),
        "Of their drafts only transformers' prompt lookup gains anything here, over its own loop. "
        "llama.cpp's package samples in Python where it drafts, and computes the head's output for "
        "every row; and the first layers of a model that was not trained for it draft badly. "
        + reproduce(REAL, bench),
    ]


def published_section() -> list[str]:
    """Every lossless method's speedup on Spec-Bench, here and in the literature."""
    bench = load("suite_spec_bench.json")
    rows = {row["method"]: row for row in bench["rows"]}
    lines = []
    for name, there in PUBLISHED.items():
        staged, own = rows.get(name), rows.get(name + OWN)
        here = "–" if own is None else f"{own['speedup']:.2f}x ({own['tokens_per_step']:.2f})"
        lines.append((f"`{name}`", here, "–" if not staged else _times(staged["speedup"]), there))
    return [
        "### Here and there",
        f"Spec-Bench's questions: {TITLES[REAL]} on an {machine(bench)} (tokens per step in "
        "brackets; –: not measured, or no accelerator of it for this model yet), and what is "
        "published, of Spec-Bench's own table for Vicuna-7B on an A100 where nothing else is said. "
        "`smollm2-draft` has 7.2M parameters and 1,000 steps of the model's own answers behind it.",
        table(("method", "here, `staged=0`", "here, in stages", "published"), lines),
        ORDER_DIFFERS,
    ]


def equal_training_section() -> list[str]:
    """Trained methods from nothing on the same answers: for as many steps, and for as long."""
    steps, seconds = "equal_training.json", "equal_training_gpu.json"
    return [
        "### Equal training",
        "Every trained method from nothing on the same answers of the model's own, in one run of "
        "`bench` each; tokens per step in brackets. *Held out*: the share of drafted tokens that "
        "are the model's, by draft step, on answers to 60 other questions.",
        "#### The same time on a GPU",
        *_equal_training(
            seconds,
            "All seven side by side on one H200, which gave each of them 283 seconds: as many "
            "tokens as its steps leave time for, of answers to 46,592 questions (8.1M tokens).",
            "bash lab/recipes/smollm2/on_a_gpu.sh DATA runs/on_a_gpu",
        ),
        "M2R2 is second: EAGLE-3 makes 30% more steps in the same time, and learns more from each "
        "after the first 300 ([why, as far as we know](experiments.md#on-a-gpu-for-the-first-time)"
        "). Its step is the cheaper one, too.",
        "#### The same steps on a CPU",
        *_equal_training(
            steps,
            "0.56M tokens of answers to 2,730 questions, 300 steps, one core.",
            "bash lab/recipes/smollm2/equal_training.sh DATA runs/equal",
        ),
    ]


def _equal_training(file: str, told: str, command: str) -> list[str]:
    bench = load(file)
    rows = {row["method"]: row for row in bench["rows"]}

    def cells(name: str) -> tuple[str, str]:
        """Without stages, with tokens per step, and in stages."""
        plain, staged = rows.get(f"{name}:staged=0"), rows.get(name)
        return (
            "–" if plain is None else f"{plain['speedup']:.2f}x ({plain['tokens_per_step']:.2f})",
            "–" if staged is None else f"{staged['speedup']:.2f}x",
        )

    lines = []
    for name, about in bench["accelerators"].items():
        own = f"{name}:lookup=0" if f"{name}:lookup=0" in rows else name
        lines.append(
            (
                f"`{name}`",
                f"{about['parameters'] / 1e6:.1f}M",
                f"{about['tokens'] / 1e6:.1f}M",
                " / ".join(f"{share:.3f}" for share in about["agreement"]),
                *cells(own),
                *cells(f"{name}:lookup=sam"),
            )
        )
    alone = f"; `sam` {rows['sam']['speedup']:.2f}x" if "sam" in rows else ""
    date = bench["date"][:10]
    return [
        f"{told} {bench['prompts']} MT-Bench prompts, {machine(bench)}, {date}{alone}.",
        table(
            (
                "method",
                "parameters",
                "tokens",
                "held out",
                "alone, `staged=0`",
                "alone",
                "joined, `staged=0`",
                "joined (`lookup=sam`)",
            ),
            lines,
        ),
        f"Reproduce with `{command}`.",
    ]


def categories_tables(runs: list[dict[str, Any]]) -> list[str]:
    """Speedups by kind of prompt: a table for each suite that has kinds."""
    parts = []
    for run in runs:
        rates = {row["method"]: row.get("categories") for row in run["rows"]}
        plain = rates.get(PLAIN)
        if not plain:
            continue
        columns = {
            kind.replace("_", " "): {
                name: of[kind] / rate for name, of in rates.items() if of and name != PLAIN
            }
            for kind, rate in plain.items()
        }
        methods = [name for name in _methods_of([run]) if name != PLAIN]
        parts += [f"`{run['suite']}` by kind of prompt, prompts' passes apart:"]
        parts += [speeds_table(methods, columns)]
    return parts


def frontier_table(bests: list[dict[str, Any]]) -> str:
    """For each method the fastest setting at each quality, and what it kept."""
    qualities = sorted({best["quality"] for best in bests}, reverse=True)
    lines = []
    for method in dict.fromkeys(best["method"] for best in bests):
        found = {best["quality"]: best for best in bests if best["method"] == method}
        cells = [
            f"{found[quality]['speedup']:.2f}x ({100 * found[quality]['kept']:.1f}%)"
            if quality in found
            else "–"
            for quality in qualities
        ]
        lines.append((f"`{method}`", *cells))
    return table(("method", *(f"{quality:.0%}" for quality in qualities)), lines)


def layerskip_section() -> list[str]:
    """LayerSkip on a base that was tuned for it."""
    path = RESULTS / "layerskip_base.json"
    if not path.exists():
        return []
    run = load(path.name)
    lines = [
        (
            f"`{row['method']}`",
            "–" if row["speedup"] is None else f"{row['speedup']:.2f}x",
            f"{row['tokens_per_step']:.2f}",
            "–" if row["acceptance"] is None else f"{100 * row['acceptance']:.0f}%",
        )
        for row in run["rows"]
    ]
    return [
        "### LayerSkip on a base tuned for it",
        "SmolLM2-135M-Instruct after 50 steps of LayerSkip's tuning for an exit after 7 of its 30 "
        "layers, 0.1M tokens of its own answers: a model of its own, whose text is not "
        f"SmolLM2's. {setting(REAL, run)}",
        table(("method", "speedup", "tokens per step", "accepted"), lines),
        "Reproduce with `python lab/recipes/tasks/tune.py --model smollm2 "
        "--data runs/equal/own.jsonl "
        "--data runs/equal/train_self.jsonl --first-layer 0 --exits 7 --steps 50 --threads 1 --out "
        "runs/layerskip/model` and `multirate bench runs/layerskip/model --suite mt_bench --data "
        "question.jsonl --limit 4 -n 96 --repeats 1 --methods autoregressive,layerskip,"
        "layerskip:adaptive=true`.",
    ]


def dynamic_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row's method, tokens/s, speedup, tokens per step, share kept, perplexity and repeats."""
    kept = 1.0 if row["lossless"] else row["kept"]
    return (
        f"`{row['method']}`",
        f"{row['tokens_per_second']:.0f}",
        "–" if row["speedup"] is None else f"{row['speedup']:.2f}x",
        f"{row['tokens_per_step']:.2f}",
        f"{100 * kept:.1f}%" if kept is not None else "–",
        f"{row['perplexity']:.2f}" if row.get("perplexity") else "–",
        f"{100 * row['repeats']:.0f}%",
    )


def dynamic_section() -> list[str]:
    """Quality against speed, from the one run that measured it."""
    path = RESULTS / f"dynamic_{REAL}.json"
    if not path.exists():
        return []
    run = load(path.name)
    lines = [dynamic_cells(row) for row in run["rows"]]
    trained = [
        f"`{name}` {of['tokens'] / 1e6:.1f}M tokens in {of['minutes']:.0f} minutes"
        for name, of in run["accelerators"].items()
    ]
    budget = run["accelerators"]["lite"]  # each rival's
    small = "m2r2-carry-equal"  # of dynamic_rivals.sh; a run may have been made without it
    equal = f"; `{small}` is `m2r2-carry` of that budget" if small in run["accelerators"] else ""
    return [
        "## Dynamic mode",
        setting(REAL, run),
        "Lossy, but for the rows without a threshold. *Kept*: the share of an answer's tokens that "
        "are what the full model says after the same text, the mean over the prompts. The fastest "
        "setting of each method that keeps so much (in brackets: what it kept) and whose answers "
        "do not run into loops, which the full model would go on with, too:",
        frontier_table(run["frontier"]),
        f"Trained: {', '.join(trained)}. Those of {budget['tokens'] / 1e6:.1f}M tokens saw the "
        f"same answers in as many steps of 2,048 tokens at most, one core each{equal}.",
        "Reproduce with `bash lab/recipes/smollm2/dynamic_rivals.sh DATA runs/dynamic`. "
        "All settings "
        "(*perplexity*: of the answers, under the full model; *repeats*: the share of the answers' "
        "tokens that only repeat what stands right before, for the third time or more):",
        table(
            ("method", "tokens/s", "speedup", "tokens per step", "kept", "perplexity", "repeats"),
            lines,
        ),
    ]


def margin_section() -> list[str]:
    """Drafts verified with narrow weights first, beside lossless rows of the same run."""
    path, other = (RESULTS / f"margin_{REAL}{which}.json" for which in ("", "_zen5"))
    if not path.exists():
        return []
    run, longer = load(path.name), load(f"margin_long_{REAL}.json")
    again = []
    if other.exists():
        there = load(other.name)
        again = [
            "The same on a processor with twice the products a cycle (Zen 5), where rows and "
            "prompts cost less; there the model's own weights read all prompts, and "
            "`int8_weights` read its answers again in a conversation:",
            *margin_run(there),
        ]
    return [
        "### Verified with narrow weights first",
        setting(REAL, longer),
        "`margin`: drafts are verified with a narrow copy of the weights, of 4 bits where they are "
        "such numbers (all layers of SmolLM2, whose file has 4) and else of 8, and a token whose "
        "two likeliest candidates are nearer than this (in logits) is decided by the model's own "
        "weights; 0: none is. `int8_weights` and `model_weights=int8` read the same copy without "
        "verified drafts. EAGLE's and Kangaroo's drafts are verified in the same way, by the same "
        "kernel. The fastest setting of each method at a share of the tokens (in brackets: what it "
        "kept):",
        frontier_table(longer["frontier"]),
        "All of them; *over lossless*: over `m2r2-carry`'s own lossless drafts in this run; *kept* "
        "and *repeats* as above.",
        margin_table(longer),
        reproduce(REAL, longer),
        "Where answers end after 96 tokens, reading prompts, which no draft makes faster, takes a "
        "larger share of the time:",
        *margin_run(run),
        *again,
    ]


def margin_run(run: dict[str, Any]) -> list[str]:
    """All of a run of `margin_section` whose rows are explained before."""
    frontier = frontier_table(run["frontier"])
    return [setting(REAL, run), frontier, margin_table(run), reproduce(REAL, run)]


def margin_table(run: dict[str, Any]) -> str:
    """All rows of a run of `margin_section`."""
    exact = next(row["speedup"] for row in run["rows"] if row["method"] == "m2r2-carry")
    lines = []
    for row in run["rows"]:
        *speeds, kept, _, repeats = dynamic_cells(row)
        lines.append((*speeds, kept, repeats, f"{row['speedup'] / exact:.2f}x"))
    heads = ("method", "tokens/s", "speedup", "tokens per step", "kept", "repeats", "over lossless")
    return table(heads, lines)


def tasks_section() -> list[str]:
    """Dynamic modes on a tuned model, by the tasks' scores: the fastest setting at each quality."""
    runs = [load(path.name) for path in sorted(RESULTS.glob("task_*.json"))]
    if not runs:
        return []
    first = runs[0]
    parts = [
        "### By a task's score",
        "SmolLM2-135M-Instruct tuned on three tasks by LoRA, its accelerators trained side by "
        "side for 130 seconds of an H200 each (M2R2's and EAGLE's go on from the package's, the "
        f"others, of which it has none, begin from nothing), {first['dtype']}, batch 1, "
        f"greedy, no examples in the prompts, {first['threads']} threads of an {machine(first)}, "
        f"{str(first['date'])[:10]}. The fastest setting of each method that keeps so much of the "
        "full model's score, one interleaved run a task; over plain decoding, prompts' passes "
        "included. In brackets the share of the score that it kept.",
    ]
    for run in runs:
        scores = next(row["scores"] for row in run["rows"] if row["method"] == "autoregressive")
        shown = ", ".join(f"{name} {value:.3g}" for name, value in scores.items())
        parts.append(f"`{run['suite']}`, {run['prompts']} documents; the full model has {shown}.")
        parts.append(frontier_table(run["frontier"]))
    parts.append(
        "Reproduce with `bash lab/recipes/tasks/on_a_gpu.sh DATA runs/tasks` (without a GPU "
        "`tasks.sh`, which trains for a fifth as long, in two hours), then "
        "`bash lab/recipes/tasks/compare.sh DATA runs/tasks`."
    )
    return parts


def batches_section() -> list[str]:
    """Batches of different prompts."""
    path = RESULTS / f"batches_{REAL}.json"
    if not path.exists():
        return []
    run = load(path.name)
    sizes = list(dict.fromkeys(row["batch"] for row in run["rows"]))
    lines = []
    for method in dict.fromkeys(row["method"] for row in run["rows"]):
        own = {row["batch"]: row for row in run["rows"] if row["method"] == method}
        cells = [f"{own[size]['speedup']:.2f}x ({100 * own[size]['kept']:.1f}%)" for size in sizes]
        lines.append((f"`{method}`", *cells))
    return [
        "### In batches",
        f"{run['prompts']} MT-Bench questions, {run['max_new_tokens']} new tokens, "
        f"{machine(run)}, {str(run['date'])[:10]}: all rows' tokens a second over plain decoding "
        "of the same batch, prompts' passes apart; in brackets the share of tokens kept.",
        table(("method", *(f"batch {size}" for size in sizes)), lines),
        "Reproduce with `python benchmarks/batches.py smollm2 --data question.jsonl`.",
    ]


def promises_section() -> list[str]:
    """Whether what `calibrate` promised was kept on fresh draws of prompts."""
    path = RESULTS / f"promises_{REAL}.json"
    if not path.exists():
        return []
    run = load(path.name)
    lines = [
        (
            row["data"],
            f"{100 * row['quality']:g}%",
            f"{row['draws_kept']} of {row['draws']}, {row['size']} prompts each",
            f"{100 * row['mean']:.1f}%",
            f"{100 * min(row['kept']):.1f}%",
        )
        for row in run["rows"]
    ]
    return [
        "### Promises on fresh prompts",
        "The promises that `calibrate` stored beside the shipped `m2r2-carry` "
        f"({run['rows'][0]['confidence']:.0%} sure), on prompts that were not calibrated on: "
        "questions that the model asked itself, as those of the calibration, and Spec-Bench's. "
        "*Kept*: the share of an answer's tokens that the full model would have said after the "
        "same text.",
        table(("prompts", "promised", "draws that kept it", "kept", "in the worst draw"), lines),
        "Reproduce with `multirate answers smollm2 --questions 520 --seed 9191 --out self.jsonl` "
        "(its first 330 questions calibrate the promises of 0.95 and 0.9, the others are asked "
        "here) and `python benchmarks/promises.py smollm2 --data self.jsonl "
        f"--data spec_bench=question.jsonl --size {run['rows'][0]['size']}`.",
    ]


def judges_section() -> list[str]:
    """Who knows what a gate's token is worth, at one gate and at several."""
    return [
        "## Who knows whether a token may leave",
        "Answers of the model to questions that no accelerator was trained on: ARLA is fitted anew "
        "on half of them, every judge is scored on the other half. *May leave*: the largest share "
        "of tokens, the surest first, so that so many of all tokens are the full model's. "
        "*accelerated*: the accelerated stream at the gate; *plain*: the model's own residual at "
        "the same layer, read by the same head.",
        *judges_of(
            f"exit_judges_{REAL}.json",
            "",
            "multirate answers smollm2 --questions 100 --seed 9 --out answers.jsonl",
        ),
        *judges_of(
            "exit_judges_three_gates.json",
            " with three gates (`--option gates=[7,15,22] --option fuse=true`, 60 steps of the "
            "data of lab/recipes/smollm2/equal_training.sh)",
            "cp runs/equal/heldout.jsonl answers.jsonl",
        ),
    ]


def judges_of(name: str, about_it: str, answers: str) -> list[str]:
    """The judges of one accelerator. answers: the command that makes answers.jsonl."""
    if not (RESULTS / name).exists():
        return []
    run = load(name)
    parts = [f"`{run['accelerator']}` on {TITLES[REAL]}{about_it}, {run['texts']} answers:"]
    for gate, streams in run["gates"].items():
        for stream, about in streams.items():
            heads = (
                "judge",
                "AUC",
                *(f"may leave at {float(k):.0%}" for k in ("0.99", "0.95", "0.9")),
            )
            lines = [
                (row["judge"], f"{row['auc']:.3f}", *(f"{s:.1%}" for s in row["leaving"].values()))
                for row in about["judges"]
            ]
            parts.append(
                f"Gate after layer {gate}, {stream}: {about['agreement']:.1%} of {about['rows']} "
                "tokens are the full model's."
            )
            parts.append(table(heads, lines))
    parts.append(
        f"Reproduce with `{answers}; "
        f"python benchmarks/exit_judges.py smollm2 -a {run['accelerator']} --data answers.jsonl`."
    )
    return parts


def loop_section() -> list[str]:
    paths = [RESULTS / f"decode_loop_{name}.json" for name in ("110M", "340M", "1.1B")]
    shapes = [load(path.name) for path in paths if path.exists()]
    return [
        "## The plain loop",
        f"Batch 1, bf16, {machine(shapes[0])}.",
        loop_table(shapes),
        "*6 rows, 8 rows*: verifying so many drafted rows against one plain step. *Second "
        "stream*: both residual streams against one. Reproduce with `python "
        "benchmarks/decode_loop.py --shape 110M`.",
    ]


def families_section() -> list[str]:
    run = load("families.json")
    lines = []
    for row in run["rows"]:
        rates = row["tokens_per_second"]
        lines.append(
            (
                row["shape"],
                f"{row['parameters'] / 1e9:.2f}B",
                f"{rates['generate']:.1f}",
                f"{rates['own layers']:.1f}",
                f"{rates['kernel']:.1f}",
                f"{rates['kernel'] / rates['generate']:.1f}x",
                f"{row['packing_seconds']:.1f} s",
            )
        )
    heads = (
        "sizes of",
        "parameters",
        "`generate`",
        "our loop, the model's own layers",
        "our loop, the kernel",
        "kernel over `generate`",
        "packing",
    )
    return [
        "### Other families of models",
        f"Plain decoding, {run['tokens']} tokens after 32, medians of {run['repeats']} repeats by "
        f"turns, tokens a second; random weights of the published sizes. Batch 1, bf16, "
        f"{machine(run)}, {run['date'][:10]}.",
        table(heads, lines),
        "Reproduce with `python benchmarks/families.py --json families.json`.",
    ]


def page() -> str:
    """docs/results.md."""
    bench, faster = load(f"mt_bench_{REAL}.json"), load(f"mt_bench_{REAL}_zen5.json")
    parts = [
        "# Results",
        "Written by `python benchmarks/render_results.py` from `lab/results/*.json`; do "
        "not edit. The machines are shared: compare within a table, not between tables.",
        "## Lossless decoding",
        setting(REAL, bench),
        method_table(REAL, bench),
        f"Trained: {training(REAL)}. {reproduce(REAL, bench)}",
        "### On a processor that multiplies twice as fast",
        f"{setting(REAL, faster)} A Zen 5, with twice the products a cycle of the table above's "
        "Zen 4. `lookahead`, `token_recycling` and `two_model` did not go in stages yet.",
        method_table(REAL, faster),
        *rivals_section(),
        *suites_section(),
        *equal_training_section(),
        *layerskip_section(),
        *dynamic_section(),
        *margin_section(),
        *tasks_section(),
        *promises_section(),
        *batches_section(),
        *judges_section(),
        *loop_section(),
        *families_section(),
        "## Experts loaded from disk",
        expert_tables.mixture(),
        "### Larger experts",
        expert_tables.wide(),
        "### The layers of larger mixtures",
        expert_tables.shapes(),
        "### Batches and drafts",
        expert_tables.batches(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    readme_path, page_path = ROOT / "README.md", ROOT / "docs" / "results.md"
    text = readme_path.read_text()
    for name, part in readme().items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in text:
            raise SystemExit(f"{readme_path.name} has no {begin} … {end} section")
        written = "\n\n".join([begin, *part, end])
        pattern = re.escape(begin) + r".*" + re.escape(end)
        text = re.sub(pattern, lambda _, written=written: written, text, flags=re.DOTALL)
    wanted = {readme_path: text, page_path: page()}
    for path, content in wanted.items():
        if "--check" not in sys.argv:
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            raise SystemExit(f"{path.name} differs from lab/results: run render_results.py")


if __name__ == "__main__":
    main()
