"""One unit of work, measured: warm-up, rotation, passes, repeats and exactness.

`run_unit` is a plain function of a unit and what the process holds, so executors only have to move units. It

- encodes the prompts, and continues a chat from autoregressive decoding's (AR's) answer, made once, untimed;
- leaves out, for all arms alike, what exceeds the target's context (`context`) or has no token (`empty`);
- decodes each batch with every arm, the order rotated from batch to batch. On a GPU there are two passes,
  `clean` and `profile` (barriers at stage edges), whose order alternates; on a CPU the clean pass has
  the stages too;
- warms each arm up at each number of rows and temperature before it is timed, and never counts that;
- classes every output against AR's of the same batch and repeat, unless its rule draws tokens of its own;
- turns a failure of one arm on one batch into rows with status `error`, and goes on.

A unit with arrivals is one stream: its prompts join while others run (decoding.loop.serve).

What it loads is `models.py`, the rows are `rows.py`, storing and resuming is `runner.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from sparkbench import arrivals
from sparkbench.decoding.loop import DecodeConfig, Generation, Request
from sparkbench.decoding.sampling import noise_key
from sparkbench.exactness import Verdict
from sparkbench.host import peak_memory
from sparkbench.models import CLEAN, PROFILE, Loaded
from sparkbench.prompts import Prompt
from sparkbench.rows import Book, Entry, Outcome, UnitResult
from sparkbench.settings import digest
from sparkbench.sweep import Plan, Unit

Advance = Callable[[str], None]

REFERENCE = 0  # the arm that is AR: settings.py puts it first
WARM_UP_TOKENS = {"cuda": 256, "cpu": 16}  # on a GPU, few tokens do not reach the kernels of deep trees


def run_unit(
    unit: Unit, loaded: Loaded, answers: Mapping[str, list[int]] | None = None, advance: Advance | None = None
) -> UnitResult:
    """Measure a unit. `answers`: known answers to earlier turns; `advance` is called after each generation.

    The result has a row for every prompt, turn, repeat, pass and arm, whatever happened.
    """
    known = dict(answers or {})
    book = Book(unit, loaded)
    shift = int(unit.fingerprint[:8], 16)  # so that the first arm differs from unit to unit as well
    for index, most in enumerate(loaded.most_rows.get(unit.temperature, ())):
        loaded.methods[index].most_rows = most
    for part in unit.parts():
        members = list(zip(unit.prompts[part], unit.copies[part], strict=True))
        batch_id = digest([unit.dataset, *(prompt.prompt_id for prompt, _ in members)])[:12]
        entries = [entry for prompt, copy in members for entry in _turns(prompt, copy, unit, loaded, known)]
        for turn in sorted({entry.turn for entry in entries}):
            here = [entry for entry in entries if entry.turn == turn]
            for repeat in range(loaded.config.repeats):
                book.skip([entry for entry in here if entry.status != "ok"], repeat)
                batch = [entry for entry in here if entry.status == "ok"]
                if batch:
                    _measure(batch, batch_id, repeat, shift, book, advance)
                    shift += 1
                elif advance is not None:
                    for arm in loaded.arms * len(loaded.passes):
                        advance(f"{unit.name} {arm.label} skipped")
    return book.result({key: ids for key, ids in known.items() if key not in (answers or {})})


def _turns(prompt: Prompt, copy: int, unit: Unit, loaded: Loaded, known: dict[str, list[int]]) -> list[Entry]:
    """The turns of a prompt as token ids; a turn continues AR's answers, and new answers go to `known`."""
    config, tools, target = loaded.config, loaded.tools, loaded.target
    messages: list[dict[str, str]] = []
    entries: list[Entry] = []
    blocked: tuple[str, str | None] | None = None
    for turn, text in enumerate(prompt.turns):
        if blocked is not None:
            entries.append(Entry(prompt, copy, turn, (), *blocked))
            continue
        messages.append({"role": "user", "content": text})
        ids: tuple[int, ...] = ()
        try:
            ids = tools.encode(target.tokenizer, messages, config.thinking)
            fits = len(ids) + config.max_new_tokens <= target.max_context
            status, error = ("ok" if fits else "context") if ids else "empty", None
            if status == "ok" and turn + 1 < len(prompt.turns):
                key = digest([prompt.dataset, prompt.prompt_id, messages, unit.temperature, copy])
                if key not in known:
                    request = Request(ids, noise_key(ids, config.seed, 0, copy))
                    decode = replace(_decode(unit, loaded), stop_ids=None)  # an answer ends where it ends
                    (answer,) = tools.generate(target, loaded.methods[REFERENCE], [request], decode)
                    known[key] = [token for token in answer.output_ids if token not in target.stop_ids]
                said = target.tokenizer.decode(known[key], skip_special_tokens=True)
                messages.append({"role": "assistant", "content": said})
        except Exception as failure:
            status, error = "error", _message(failure)
        entries.append(Entry(prompt, copy, turn, ids, status, error))
        if status != "ok":
            blocked = (status, error)
    return entries


def first_turns(plan: Plan, loaded: Loaded) -> list[tuple[int, ...]]:
    """Token ids of the first turns of a sweep's prompts that fit the target's context."""
    ids = {
        (prompt.dataset, prompt.prompt_id): loaded.tools.encode(
            loaded.target.tokenizer, [{"role": "user", "content": prompt.turns[0]}], loaded.config.thinking
        )
        for unit in plan.units
        for prompt in unit.prompts
    }
    room = loaded.target.max_context - loaded.config.max_new_tokens
    return [each for each in ids.values() if 0 < len(each) <= room]


def _measure(
    batch: Sequence[Entry], batch_id: str, repeat: int, shift: int, book: Book, advance: Advance | None
) -> None:
    """Decode one batch with every arm in every pass, class the outputs, and put the rows into `book`."""
    unit, loaded = book.unit, book.loaded
    seed = loaded.config.seed
    starts = arrivals.moments(unit.arrivals, len(batch), seed, repeat) if unit.arrivals else [0.0] * len(batch)
    requests = [
        Request(entry.ids, noise_key(entry.ids, seed, repeat, entry.copy), start)
        for entry, start in zip(batch, starts, strict=True)
    ]
    rows = min(unit.batch_size, len(requests))
    for index in range(len(loaded.arms)):
        shape = (index, rows, unit.temperature)
        if shape not in loaded.warm:
            _attempt(index, requests[:rows], _warm_up(unit, loaded), loaded, 0)
            loaded.warm.add(shape)
    count = len(loaded.arms)
    rotated = [(position + shift) % count for position in range(count)]
    outcomes: dict[tuple[str, int], Outcome] = {}
    for name in loaded.passes if shift % 2 == 0 else loaded.passes[::-1]:
        for order, index in enumerate(rotated):
            config = _decode(unit, loaded, profile=name == PROFILE)
            slots = unit.batch_size if unit.arrivals else None
            outcomes[name, index] = _attempt(index, requests, config, loaded, order, slots)
            if advance is not None:
                advance(f"{unit.name} {loaded.arms[index].label}")
    reference = outcomes[CLEAN, REFERENCE].generations
    for (name, index), outcome in sorted(outcomes.items()):
        for row, entry in enumerate(batch):
            generation = outcome.generations[row] if outcome.generations else None
            verdict = None
            compared = (name, index) != (CLEAN, REFERENCE) and loaded.arms[index].rule == "match"
            if generation is not None and reference and compared:
                verdict = _verdict(requests[row], reference[row], generation, rows, unit, loaded)
            book.add(entry, batch_id, repeat, name, index, outcome, generation, verdict)


def _verdict(
    request: Request, reference: Generation, other: Generation, rows: int, unit: Unit, loaded: Loaded
) -> Verdict:
    """Class an output. The width noise is measured when it is first needed, on this text, for this many rows."""
    noise: dict[int, float] = {}
    if other.output_ids != reference.output_ids:
        if rows not in loaded.noise:
            widths = sorted({method.max_nodes + 1 for method in loaded.methods})
            text = reference.output_ids
            loaded.noise[rows] = loaded.tools.width_noise(loaded.target, request, text, widths, rows)
        noise = loaded.noise[rows]
    sampling = loaded.config.sampling(unit.temperature)
    return loaded.tools.classify(loaded.target, request, reference, other, sampling, noise, rows)


def _attempt(
    index: int,
    requests: Sequence[Request],
    config: DecodeConfig,
    loaded: Loaded,
    order: int,
    slots: int | None = None,
) -> Outcome:
    """Decode requests with one arm, as a stream of at most `slots` rows at a time or, if that is None, as one batch."""
    on_gpu = loaded.target.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(loaded.target.device)
    generations: Sequence[Generation] = ()
    error = None
    try:
        target, method = loaded.target, loaded.methods[index]
        if slots is None:
            generations = loaded.tools.generate(target, method, requests, config)
        else:
            generations = loaded.tools.serve(target, method, requests, config, slots)
    except Exception as failure:
        error = _message(failure)
        if _is_memory(failure):
            longest = max(len(request.prompt_ids) for request in requests)
            error = (
                f"out of memory at batch size {min(slots or len(requests), len(requests))}, prompts of up to "
                f"{longest} tokens and {config.max_new_tokens} new ones: {_first_line(failure)}"
            )
    if error is not None and on_gpu:
        torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_allocated(loaded.target.device) if on_gpu else None
    return Outcome(generations, error, order, peak, peak_memory())


def _decode(unit: Unit, loaded: Loaded, profile: bool = False) -> DecodeConfig:
    config = loaded.config
    stop_ids = frozenset[int]() if config.ignore_eos else None
    return DecodeConfig(config.max_new_tokens, config.sampling(unit.temperature), stop_ids, profile)


def _warm_up(unit: Unit, loaded: Loaded) -> DecodeConfig:
    """Long enough to reach every kernel, and past stop tokens, since outputs may be short."""
    tokens = min(loaded.config.max_new_tokens, WARM_UP_TOKENS[loaded.target.device.type])
    return DecodeConfig(tokens, loaded.config.sampling(unit.temperature), stop_ids=frozenset())


def _message(failure: Exception) -> str:
    return f"{type(failure).__name__}: {_first_line(failure)}"


def _is_memory(failure: Exception) -> bool:
    """Whether memory ran out; torch's allocator of the CPU says so by a plain RuntimeError."""
    return isinstance(failure, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(failure)


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or ["no message"])[0][:300]
