"""`sparkbench ngram build` and `info`: an n-gram index from text, token files or a `.trie`, and what one holds.

The work is in sparkbench/ngram/.
"""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkbench.cli.console import literal, print_json, show, table
from sparkbench.cli.options import Json, check_file, text
from sparkbench.errors import UsageError

if TYPE_CHECKING:
    from sparkbench.cli.progress import Bar, Lines
    from sparkbench.ngram.build import Document
    from sparkbench.ngram.describe import Description
    from sparkbench.ngram.index import NgramIndex
    from sparkbench.ngram.tokens import Tokens

ORDER = 3
MEMORY = "1GiB"
UNITS = {
    "": 1,
    "B": 1,
    **{f"{k}{b}": base**i for i, k in enumerate("KMGT", 1) for b, base in (("B", 1000), ("iB", 1024))},
}
EMBEDDED = "embedded"

app = typer.Typer(help="Build an n-gram index, or describe one.", rich_markup_mode=None)


@app.callback()
def ngram() -> None:
    """Build an n-gram index, or describe one."""


@app.command("build")
def build(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="INPUT...", help="Folders, .jsonl, .txt or .npy files, or one .trie.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The index.", show_default=False)],
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="ID", help="embedded, a folder or a hub id. Default for text: embedded."),
    ] = None,
    order: Annotated[
        int | None, typer.Option("--order", metavar="N", help=f"Longest n-gram. Default: {ORDER}.")
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help=f"Of all buffers. Default: {MEMORY}.", show_default=False)
    ] = MEMORY,
    end_token: Annotated[
        int | None, typer.Option("--end-token", metavar="ID", help="Ends documents. Default: the tokenizer's.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", metavar="N", help="Default: the tokenizer's, or what a .trie holds.")
    ] = None,
    corpus: Annotated[str, typer.Option("--corpus", metavar="TEXT", help="A note on the text.")] = "",
    temp: Annotated[
        Path | None, typer.Option("--temp", metavar="FOLDER", help="For temporary files. Default: beside --out.")
    ] = None,
    json: Json = False,
) -> None:
    """Count n-grams of text or token files, or convert a published .trie.

    A line of a .jsonl is {"text": "..."} or {"ids": [...]}; a .txt is one document; a .npy holds tokens, and
    its documents end with the end token.
    """
    check_file("--out", out)
    limit = size("--memory", memory)
    note = text("--corpus", corpus)

    from sparkbench.ngram.documents import TRIE, find_files

    files = find_files(inputs)
    if any(path.resolve() == out.resolve() for path in files):
        raise UsageError(f"--out {out} is one of the inputs")
    common = {"corpus": note, "memory_bytes": limit, "temp": temp}
    started = time.perf_counter()
    if any(path.suffix == TRIE for path in files):
        if len(files) > 1:
            raise UsageError(f"a {TRIE} file is converted alone; leave the other inputs out")
        if end_token is not None:
            raise UsageError(f"--end-token has no meaning for a {TRIE} file")
        index = converted(files[0], out, tokenizer, order, vocab_size, common)
    else:
        index = counted(files, out, tokenizer, ORDER if order is None else order, end_token, vocab_size, common)
    report(index, time.perf_counter() - started, json)


def converted(
    path: Path,
    out: Path,
    tokenizer: str | None,
    order: int | None,
    vocab_size: int | None,
    common: dict[str, Any],
) -> "NgramIndex":
    from sparkbench.cli.progress import progress
    from sparkbench.ngram import trie
    from sparkbench.ngram.tokens import Tokens

    if order is not None and order != (own := trie.read_order(path)):
        raise UsageError(f"--order {order} is not allowed: {path} is of order {own}")
    tokens = None if tokenizer is None else Tokens.load(tokenizer)
    if vocab_size is None and tokens is not None:
        vocab_size = tokens.vocab_size
    with progress() as shown:
        return trie.convert(path, out, vocab_size, tokenizer=tokens.label if tokens else "", tell=shown.note, **common)


def counted(
    files: Sequence[Path],
    out: Path,
    tokenizer: str | None,
    order: int,
    end_token: int | None,
    vocab_size: int | None,
    common: dict[str, Any],
) -> "NgramIndex":
    from sparkbench.cli.progress import progress
    from sparkbench.ngram.build import BuildSpec, build
    from sparkbench.ngram.documents import has_text
    from sparkbench.ngram.tokens import Tokens

    tokens = None
    if tokenizer is not None or has_text(files):
        tokens = Tokens.load(tokenizer or EMBEDDED)
        vocab_size = tokens.vocab_size if vocab_size is None else vocab_size
        end_token = tokens.end_token if end_token is None else end_token
    if vocab_size is None or end_token is None:
        missing = "--end-token ID" if vocab_size is not None else "--tokenizer ID, or --vocab-size N and --end-token ID"
        raise UsageError(f"token ids need {missing}")
    spec = BuildSpec(vocab_size, order, end_token, tokenizer=tokens.label if tokens else "", **common)
    with progress() as shown:
        return build(documents(files, tokens, end_token, shown), out, spec, shown.note)


def documents(
    files: Sequence[Path], tokens: "Tokens | None", end_token: int, shown: "Lines | Bar"
) -> Iterator["Document"]:
    """All documents of the files. UsageError: there are none."""
    from sparkbench.ngram.documents import read_documents

    found = False
    shown.start(len(files))
    for path in files:
        for document in read_documents(path, tokens.encode if tokens else None, end_token):
            found = True
            yield document
        shown.advance(path.name)
    if not found:
        raise UsageError(f"{', '.join(map(str, files[:3]))}: there is no document")


@app.command("info")
def info(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="An n-gram index.")],
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="ID", help="Decodes tokens. Default: the index's, if it is embedded."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read it all, and check its digest and order.")] = False,
    json: Json = False,
) -> None:
    """Describe an n-gram index: nodes by depth, size, and its most frequent tokens.

    An index of another tokenizer gives plausible numbers, too: look whether the decoded tokens are frequent ones.
    """
    from sparkbench.ngram.describe import describe
    from sparkbench.ngram.index import NgramIndex
    from sparkbench.ngram.tokens import Tokens

    index = NgramIndex.open(path)
    if verify:
        index.verify()
    found = describe(index)
    if tokenizer is None and found.tokenizer.partition("@")[0] == EMBEDDED:
        tokenizer = EMBEDDED
    texts = None
    if tokenizer is not None:
        texts = Tokens.load(tokenizer).decode([token for token, _ in found.frequent])
    if json:
        print_json({"file": path, **vars(found), "frequent_texts": texts, "verified": verify})
        return
    show_description(path, found)
    if verify:
        show("verified: its digest fits, and its nodes are in order")
    rows = [[str(token), f"{count:,}"] for token, count in found.frequent]
    columns = ["token", "count"]
    if texts is not None:
        columns.append("text")
        rows = [[*row, repr(each)] for row, each in zip(rows, texts, strict=True)]
    show("", table(columns, rows, right=("token", "count")))


def report(index: "NgramIndex", seconds: float, json: bool) -> None:
    """What was built, and what that took."""
    from sparkbench.host import peak_memory
    from sparkbench.ngram.describe import describe

    found, peak = describe(index), peak_memory()
    if json:
        print_json({"file": index.source, **vars(found), "seconds": seconds, "peak_bytes": peak})
        return
    show_description(Path(index.source), found)
    held = "" if peak is None else f", peak memory {peak / 2**20:,.0f} MiB (all of the process)"
    show(f"built in {seconds:.1f} s{held}")


def show_description(path: Path, found: "Description") -> None:
    depths = ", ".join(f"{size:,}" for size in found.nodes)
    documents = f" of {found.documents:,} documents" if found.documents else ""
    facts = [
        f"{path}: order {found.order}, {found.vocab_size:,} tokens in the vocabulary",
        f"{1 + sum(found.nodes):,} nodes: the root, and by depth {depths}",
        f"{found.bytes_per_node:.2f} bytes a node, {found.bytes:,} bytes",
        f"counted: {found.total_tokens:,} tokens{documents}",
        *(f"{name}: {value}" for name in ("corpus", "tokenizer") if (value := getattr(found, name))),
    ]
    for fact in facts:
        show(literal(fact), wrap=False)


def size(option: str, value: str) -> int:
    """A size in bytes, such as 512MiB, 1.5GB or 100000."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?([A-Za-z]*)", value)
    if not found or found[2] not in UNITS:
        raise UsageError(f"{option} {value!r} is not allowed: a size like 512MiB, 1.5GB or 100000")
    return int(float(found[1]) * UNITS[found[2]])
