"""`sparkbench profile`: what a forward costs against its tokens, context and batch size, and the step curve of it.

Options become a grid of measurements; what is measured, and how, is the business of `sparkbench.profiling`. Values that
`run` has too are checked by its SweepConfig.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkbench.cli.console import literal, print_json, show, table
from sparkbench.cli.options import Device, Dtype, Json, Revision, Target, Threads, check_file, given, pairs
from sparkbench.errors import UsageError

if TYPE_CHECKING:
    from sparkbench import decoding
    from sparkbench.profiling.profile import Profile
    from sparkbench.settings import SweepConfig

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256,)
BATCH_SIZES = (1,)
REPEATS = 9
BUDGET = 64  # of tree methods, whose drafting does not depend on it
RESULTS = Path("results")
NAMED = "qwen3-0.6b, -1.7b, -4b, -8b, -14b or -30b-a3b"
Texts = list[str] | None


def command(
    target: Target = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="NAME", help=f"Random weights instead, in the shape of {NAMED}."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", help="Cut a shape to N layers. Default: all.")
    ] = None,
    drafter: Annotated[
        Texts,
        typer.Option("--drafter", metavar="METHOD=ID", help="Times its drafting; repeat. Default: the target's own."),
    ] = None,
    index: Annotated[
        Texts,
        typer.Option("--index", metavar="FILE", help="Times look-ups in an n-gram index; repeat. Default: its own."),
    ] = None,
    tokens: Annotated[
        Texts,
        typer.Option("--tokens", metavar="LIST", help="Tokens a forward, all rows together. Default: 1 to 256."),
    ] = None,
    context: Annotated[
        Texts, typer.Option("--context", metavar="LIST", help="Tokens in the cache of a row. Default: 256.")
    ] = None,
    batch_size: Annotated[Texts, typer.Option("--batch-size", metavar="LIST", help="Rows. Default: 1.")] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", metavar="N", help=f"Forwards of a kind. Default: {REPEATS}.")
    ] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.json", help="The step curve. Default: in results/, named by the target."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure what a forward costs against its tokens, context and batch size; save the step curve.

    Nothing needs a download: the embedded target is the default, and --shape makes random weights.
    """
    if shape is not None and (target is not None or revision is not None):
        raise UsageError("--shape makes random weights: --target and --revision have no meaning with it")
    if layers is not None and shape is None:
        raise UsageError("--layers cuts a --shape; name one")
    batches = numbers("--batch-size", batch_size, BATCH_SIZES)
    contexts = numbers("--context", context, CONTEXTS)
    widths = numbers("--tokens", tokens, TOKENS)

    from sparkbench.settings import SweepConfig

    config = SweepConfig(
        **given(
            target=target,
            drafters=drafter and pairs("--drafter", drafter),
            revision=revision,
            dtype=dtype,
            device=device,
            repeats=REPEATS if repeats is None else repeats,
            threads=threads,
        )
    )
    check_file("--out", RESULTS / "x" if out is None else out)

    from sparkbench.cli.progress import progress
    from sparkbench.profiling.profile import Grid, measure

    loaded = load(config, shape, layers)
    methods = drafting(config, loaded, shape)
    files = indexed(config, shape) if index is None else tuple(index)
    with progress() as shown:
        profile = measure(loaded, methods, Grid(batches, contexts, widths, config.repeats), shown, files)
    label = config.target if shape is None else shape if layers is None else f"{shape}-{layers}-layers"
    place = default_out(label, loaded.device.type) if out is None else out
    profile.curves.save(place)
    if json:
        print_json({"out": place, **document(profile)})
    else:
        show_profile(profile, loaded.device.type)
        show("", literal(f"step curve in {place}"), wrap=False)


def load(config: "SweepConfig", shape: str | None, layers: int | None) -> "decoding.target.Target":
    """The target, with the threads set that it is measured with."""

    from sparkbench import catalog, models
    from sparkbench.decoding import target
    from sparkbench.profiling import shapes

    if shape is None:
        source = catalog.resolve_target(config.target)
        loaded = target.Target.load(  # not models.load_target: no tokenizer is needed
            source, name=config.target, revision=config.revision, dtype=config.dtype, device=config.device
        )
    else:
        figures, name = shapes.named(shape, layers)
        place = target.resolve_device(config.device)
        loaded = shapes.random_target(figures, name, target.resolve_dtype(config.dtype, place), place)
    models.set_threads(config.threads, loaded)
    return loaded


def drafting(config: "SweepConfig", target: Any, shape: str | None) -> dict[str, Any]:
    """A method for each drafter: those that were named, or else the target's own; by the name it was given."""
    from sparkbench import catalog, drafters, registry

    sources = dict(config.drafters)
    if not sources and shape is None:
        known = [each for each in catalog.targets() if each.name == config.target]
        sources = dict(known[0].drafters) if known else {}
    methods = {}
    for name, source in sources.items():
        users = [each for each in registry.names() if registry.get(each).drafter_kind == name]
        chosen = name if name in registry.names() else users[0]
        kind = registry.get(chosen).drafter_kind
        if kind is None:
            raise UsageError(f"--drafter {name}: it has no drafter")
        found = drafters.load(kind, catalog.resolve_drafter(kind, target.name, source), target)
        methods[name] = registry.build(registry.Variant.parse(chosen), drafter=found, budget=BUDGET)
    return methods


def indexed(config: "SweepConfig", shape: str | None) -> tuple[str, ...]:
    """The target's own n-gram index, where it is a file of this machine."""
    from sparkbench import catalog

    known = [each.index for each in catalog.targets() if each.name == config.target and shape is None]
    return tuple(file for file in known if Path(file).is_file())


def numbers(option: str, texts: Sequence[str] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Comma lists of whole numbers above 0, ascending and distinct."""
    parts = [part.strip() for text in texts or () for part in text.split(",") if part.strip()]
    for part in parts:
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", part):
            raise UsageError(f"{option} {part!r} is not allowed: whole numbers, 1 or above, separated by commas")
    if texts and not parts:
        raise UsageError(f"{option}: give at least one number")
    return tuple(sorted({int(part) for part in parts})) if parts else default


def default_out(label: str, device: str) -> Path:
    """results/profile-<label>-<device>.json, with the label made fit for a file name."""
    return RESULTS / f"profile-{re.sub(r'[^A-Za-z0-9._]+', '-', label).strip('-.')}-{device}.json"


def document(profile: "Profile") -> dict[str, Any]:
    """The profile for --json."""
    curves = profile.curves
    named = ("target", "revision", "device", "dtype", "threads", "versions", "curves")
    return {**{name: getattr(curves, name) for name in named}, **curves.beside}


def show_profile(profile: "Profile", device: str) -> None:
    curves, peaks, side = profile.curves, profile.peaks, profile.peaks.side
    threads = f", threads: {curves.threads}" if device == "cpu" else ""
    show(literal(f"{curves.target} on {curves.device} ({curves.dtype}{threads})"), "")
    columns = ["batch", "context", "tokens"]
    costs = ["pack ms", "verify ms", "smoothed", "bandwidth", "arithmetic"]
    rows = [
        [
            *map(str, (row.batch_size, row.context, row.tokens)),
            *map(milliseconds, (row.pack_s, row.raw_s, row.smooth_s)),
            f"{row.of_bandwidth:.1%}",
            f"{row.of_peak:.1%}",
        ]
        for row in profile.rows
    ]
    show(table(columns + costs, rows, right=columns + costs), "")
    show(
        f"100 % bandwidth: {peaks.bytes_per_s / 1e9:,.1f} GB/s, a float32 sum over {peaks.read_bytes >> 20} MiB",
        f"100 % arithmetic: {peaks.flops_per_s / 1e9:,.1f} GFLOP/s, a {peaks.dtype} product of {side} x {side}",
    )
    if any(row.of_bandwidth > 1 for row in profile.rows):
        show("above 100 %: the weights stay in the processor's caches, which are faster than its memory")
    if profile.drafts:
        names = ["drafter of", "batch", "context", "draft ms"]
        rows = [
            [draft.method, str(draft.batch_size), str(draft.context), milliseconds(draft.draft_s)]
            for draft in profile.drafts
        ]
        show("", table(names, rows, right=names[1:]))
    if profile.lookups:
        names = ["n-gram index", "nodes", "bytes a node", "cold us", "warm us"]
        rows = [
            [
                Path(each.index).name,
                f"{each.nodes:,}",
                f"{each.bytes_per_node:.1f}",
                f"{each.cold_s * 1e6:.2f}",
                f"{each.warm_s * 1e6:.2f}",
            ]
            for each in profile.lookups
        ]
        show("", table(names, rows, right=names[1:]), "a context with 25 candidates; cold: pages read from the disk")
    if profile.experts:
        counts = ["distinct experts", "if uniform"]
        rows = [
            [*map(str, (each.batch_size, each.context, each.tokens)), f"{each.distinct:.1f}", f"{each.uniform:.1f}"]
            for each in profile.experts
        ]
        show("", table(columns + counts, rows, right=columns + counts))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
