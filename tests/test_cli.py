"""The command line: what it imports, its exit codes and one-line errors, and each command on tiny models.

The models are the golden target and drafter with a tokenizer of bytes, so that any text is a prompt.
"""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkbench import cli
from sparkbench.cli import progress
from sparkbench.errors import NotComparable, RunError, UsageError
from sparkbench.report.summary import Summary
from sparkbench.sweep import SweepConfig

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "dflash_ddtree"
MAIN = "import sys; from sparkbench.cli import main; sys.exit(main())"
NASTY = "[INST] a[0] = b[i] [/usr/bin] [bold]x \U0001f600\t\x1b[31m\n\u202e" + "y" * 200
SHOWN = "[INST] a[0] = b[i] [/usr/bin] [bold]x \U0001f600\\t\\x1b[31m\\n\\u202e" + "y" * 200


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON on stdout, which must be one line."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command in this process."""

    def run(*arguments: str) -> Done:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


def start(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own."""
    keep = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        env={**keep, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        cwd=cwd,
        capture_output=True,
        check=False,
    )


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options that name the tiny target, which has a tokenizer of the 256 bytes, and its drafter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("family")
    for name in ("target", "draft"):
        shutil.copytree(GOLDEN / name, folder / name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "target")
    return ("--target", str(folder / "target"), "--drafter", str(folder / "draft"))


# The program as a whole


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "pyarrow", "numpy", "numba", "matplotlib", "huggingface_hub", "rich")
    code = f"import sys, sparkbench.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, text=True)
    assert done.stdout == "[]\n"


def test_help_names_what_there_is_and_nothing_else(invoke: Callable[..., Done]) -> None:
    done = invoke("--help")
    commands = [line.split()[0] for line in done.out.partition("Commands:")[2].splitlines() if line.strip()]
    assert commands[: commands.index("Try")] == ["run", "list", "doctor", "trace", "profile", "train", "ngram"]
    assert "modal" not in invoke("run", "--help").out


def test_without_a_command_help_goes_to_stderr(invoke: Callable[..., Done]) -> None:
    done = invoke()
    assert (done.code, done.out) == (2, "")
    assert "Commands:" in done.err


def test_the_reference_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "make_cli_docs.py"), "--check"], check=False)
    assert done.returncode == 0, "run scripts/make_cli_docs.py"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("a bad name"), 2, "a bad name"),
        (NotComparable("other machine"), 3, "other machine"),
        (RunError("disk\nfull"), 4, "disk full"),
        (
            ValueError("odd \x1b[2J"),
            4,
            "ValueError: odd \\x1b[2J (SPARKBENCH_TRACEBACK=1 shows the traceback)",
        ),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    error: Exception, code: int, line: str, invoke: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[str]:
        raise error

    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    monkeypatch.setattr("sparkbench.prompts.dataset_names", fail)
    assert invoke("list", "datasets") == Done(code, "", f"sparkbench: error: {line}\n")
    monkeypatch.setenv(cli.TRACEBACK, "1")
    unexpected = isinstance(error, ValueError)
    assert ("Traceback" in invoke("list", "datasets").err) is unexpected


def test_ctrl_c_is_130(invoke: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparkbench.prompts.dataset_names", interrupt)
    assert invoke("list", "datasets").code == 130


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_quiet(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "list", "datasets"],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zz"], "zz"),
        (["run", "--zz"], "--zz"),
        (["run", "--limit", "x"], "--limit"),
        (["run", "--limit", "0"], "1 or above"),
        (["run", "--max-new-tokens", "0"], "1 or above"),
        (["run", "--max-new-tokens", "-3"], "1 or above"),
        (["run", "--temperature", "-1"], "0 or above"),
        (["run", "--temperature", "0,nan"], "finite"),
        (["run", "--temperature", "warm"], "finite"),
        (["run", "--budget", "-1"], "0 to"),
        (["run", "--budget", "8,x"], "0 to"),
        (["run", "--batch-size", "0"], "1 or above"),
        (["run", "--top-p", "0"], "at most 1"),
        (["run", "--method", "zz"], "autoregressive"),
        (["run", "--method", "ddtree:zz=1"], "builder"),
        (["run", "--dataset", "zz"], "gsm8k"),
        (["run", "--data", "nowhere"], "bundled"),
        (["run", "--dtype", "int3"], "bfloat16"),
        (["run", "--drafter", "dflash"], "METHOD=ID"),
        (["run", "--drafter", "zz=a"], "dflash"),
        (["run", "--thinking", "maybe"], "on, off"),
        (["run", "--on", "mars"], "local"),
        (["run", "--config", "nowhere.toml"], "nowhere.toml"),
        (["run", "--method", "ar", "--target", "no-such"], "hub id"),
        (["list", "zz"], "methods, datasets, targets"),
        (["trace"], "prompt"),
        (["trace", "x", "--max-new-tokens", "0"], "1 or above"),
        (["trace", "x", "--method", "zz"], "autoregressive"),
        (["trace", "\udcff"], "UTF-8"),
        (["train"], "train --help"),
        (["train", "zz"], "zz"),
        (["train", "embedded", "--threads", "0"], "1 or above"),
        (["train", "embedded", "--out", __file__], "a folder is needed"),
    ],
)
def test_a_bad_value_is_one_line_that_says_what_is_allowed(
    arguments: list[str], said: str, invoke: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("sparkbench.decoding.target.Target.load", load)
    done = invoke(*arguments)
    assert (done.code, done.out) == (2, "")
    errors = [line for line in done.err.splitlines() if line.startswith("sparkbench: error: ")]
    assert len(errors) == 1
    assert said in errors[0]


# list and doctor


def test_list_shows_methods_data_sets_and_targets(invoke: Callable[..., Done]) -> None:
    found = invoke("list", "--json").document
    assert list(found) == ["methods", "datasets", "targets"]
    methods = {entry["name"]: entry for entry in found["methods"]}
    assert methods["autoregressive"]["drafter_kind"] is None
    assert methods["ddtree"]["takes_budget"] is True
    assert "drafter" in methods["ddtree"]["options"]
    assert "embedded" in methods["ddtree"]["drafters"]
    gsm8k = next(entry for entry in found["datasets"] if entry["name"] == "gsm8k")
    assert gsm8k["bundled_rows"] >= 16
    assert gsm8k["hub"]["rows"] == 1319
    assert found["targets"][0]["name"] == "embedded"
    shown = invoke("list").out
    for entries in found.values():
        assert all(entry["name"] in shown for entry in entries)
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_doctor_fails_only_when_the_embedded_default_cannot_run(
    invoke: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sparkbench.catalog.embedded_folder", lambda: tmp_path)
    done = invoke("doctor", "--json")
    statuses = {check["name"]: check["status"] for check in done.document["checks"]}
    assert done.code == 4
    assert done.document["runs"] is False
    assert [name for name, status in statuses.items() if status == "failed"] == ["embedded"]
    assert {"python", "torch", "transformers", "cpu", "memory", "disk", "OMP_WAIT_POLICY"} < set(statuses)


# trace


def test_trace_shows_rounds_and_a_tree(invoke: Callable[..., Done], family: tuple[str, ...]) -> None:
    arguments = ("trace", NASTY, "--max-new-tokens", "16", *family)
    found = invoke(*arguments, "--json").document
    committed = sum(len(done["draft"]) + (done["bonus"] is not None) for done in found["rounds"])
    assert committed + 1 == found["tokens_out"]
    assert found["tau"] == pytest.approx(committed / len(found["rounds"]))
    tree = found["rounds"][found["shown"]]
    assert tree["cold"] is False
    assert tree["drafted"] == len(tree["nodes"]) - 1 == 16
    path = [node for node in tree["nodes"] if node["accepted"]]
    assert [node["token"] for node in path] == tree["draft"]
    for node in tree["nodes"][1:]:
        above = tree["nodes"][node["parent"]]["path_probability"] or 1.0
        assert node["path_probability"] == pytest.approx(node["probability"] * above, rel=1e-4)

    shown = invoke(*arguments)
    assert SHOWN in shown.out
    assert "\x1b" not in shown.out
    assert f"draft tree of round {tree['index']} (16 nodes, * accepted)" in shown.out
    assert sum(line.startswith("*") for line in shown.out.splitlines()) == len(path)


def test_trace_of_a_method_without_drafts(invoke: Callable[..., Done], family: tuple[str, ...]) -> None:
    arguments = ("trace", "hi", "--method", "ar", "--max-new-tokens", "4", *family[:2])
    done = invoke(*arguments)
    assert done.code == 0
    assert "nothing was drafted" in done.out
    assert "tau 1.00" in done.out
    assert invoke(*arguments, "--round", "1").code == 2


def test_trace_refuses_a_round_or_a_prompt_that_does_not_fit(
    invoke: Callable[..., Done], family: tuple[str, ...]
) -> None:
    missing = invoke("trace", "hi", "--max-new-tokens", "4", "--round", "99", *family)
    assert missing.code == 2
    assert "--round 99 does not exist" in missing.err
    long = invoke("trace", "x" * 1000, "--max-new-tokens", "64", *family)
    assert long.code == 2
    assert "the context of 1024" in long.err


def test_trace_is_safe_under_all_settings_of_a_terminal(
    invoke: Callable[..., Done], family: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("trace", NASTY, "--max-new-tokens", "6", *family)
    documents = []
    for environment in ({"COLUMNS": "40", "TERM": "dumb"}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}):
        with monkeypatch.context() as context:
            for name, value in environment.items():
                context.setenv(name, value)
            shown = invoke(*arguments)
            documents.append(invoke(*arguments, "--json").document)
        assert (shown.code, SHOWN in shown.out) == (0, True)
        assert ("\x1b" in shown.out) is ("FORCE_COLOR" in environment)
        assert "\x1b" not in shown.err
        del documents[-1]["decode_s"]
    assert documents[0] == documents[1] == documents[2]


def test_trace_where_the_encoding_has_neither_emoji_nor_lines(
    family: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    assert cli.main(["trace", NASTY, "--max-new-tokens", "16", *family]) == 0
    assert b"[bold]x \\U0001f600" in written.getvalue()
    assert b"|-'" in written.getvalue()


def test_the_tree_is_walked_with_likelier_siblings_first() -> None:
    from sparkbench.cli.trace_view import _walk
    from sparkbench.tracing import Node, Token

    def node(parent: int, depth: int, probability: float | None) -> Node:
        return Node(Token(0, "a"), parent, depth, False, probability, probability)

    nodes = [node(-1, 0, None), node(0, 1, 0.2), node(0, 1, 0.5), node(2, 2, 0.4), node(1, 2, 0.1)]
    order = [(nodes.index(found), guide.replace("\u2500", "-")) for found, guide in _walk(nodes)]
    assert order == [(0, ""), (2, "\u251c-"), (3, "\u2502 \u2514-"), (1, "\u2514-"), (4, "  \u2514-")]


# run


def test_progress_in_plain_lines_says_the_first_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress() as shown:
        shown.start(100)
        for step in range(100):
            shown.advance(f"step {step} \x1b")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "1/100 step 0 \\x1b"
    assert captured.err.splitlines()[-1] == "100/100 step 99 \\x1b"
    assert len(captured.err.splitlines()) < 10


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The settings with which sweeps were started, instead of running them."""
    from sparkbench.runner import RunOutcome

    started: list[Any] = []

    def run(config: Any, out: Path, _: object) -> RunOutcome:
        started.append((config, out))
        return RunOutcome(out, 3, 3, 12, 0, 0, 0, 0, ("[odd] note",))

    monkeypatch.setattr("sparkbench.runner.run", run)
    monkeypatch.setattr("sparkbench.report.summary.summarise", lambda _: Summary((), ("a warning",)))
    monkeypatch.chdir(tmp_path)
    return started


def test_run_without_arguments_implies_a_small_limit_and_says_so(invoke: Callable[..., Done], swept: list[Any]) -> None:
    done = invoke("run")
    assert done.code == 0
    assert "--limit 4 is implied" in done.err
    assert "[odd] note" in done.err
    config, out = swept[0]
    assert config == SweepConfig(limit=4)
    assert (config.target, config.budgets, config.temperatures, config.seed) == ("embedded", (64,), (0.0,), 0)
    assert len(config.datasets) == 6
    assert f"results in {out} (3 of 3 units measured now)" in done.out

    assert invoke("run", "--seed", "1").code == 0
    assert swept[1] == (SweepConfig(seed=1), swept[1][1])
    assert swept[1][1] != out


def test_every_option_of_run_reaches_the_sweep(invoke: Callable[..., Done], swept: list[Any], tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text('budgets = [4]\nseed = 5\ntarget = "Qwen/Qwen3-4B"\n')
    options = """run --method dflash,ddtree:builder=heap --method ar --temperature 0,0.5 --temperature 1
        --budget 8 --batch-size 1,2 --drafter dflash=a/b --revision main --dtype float32 --device cpu
        --thinking on --limit 2 --max-new-tokens 9 --top-k 3 --top-p 0.5 --repeats 2 --threads 1 --strict
        --min-p 0.1 --repetition-penalty 1.2 --rule match --ignore-eos --arrivals poisson:2 --switch-to-ar 3
        --config sweep.toml --out place --data bundled --dataset gsm8k,mbpp --on local --json"""
    assert invoke(*options.split()).code == 0
    expected = SweepConfig(
        target="Qwen/Qwen3-4B",
        methods=("dflash", "ddtree:builder=heap"),
        datasets=("gsm8k", "mbpp"),
        temperatures=(0.0, 0.5, 1.0),
        budgets=(8,),
        batch_sizes=(1, 2),
        drafters={"dflash": "a/b"},
        revision="main",
        dtype="float32",
        device="cpu",
        thinking=True,
        limit=2,
        max_new_tokens=9,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        rule="match",
        ignore_eos=True,
        arrivals="poisson:2",
        switch_to_ar=3,
        seed=5,
        repeats=2,
        threads=1,
        strict=True,
    )
    assert swept == [(expected, Path("place"))]


def test_run_in_json_is_one_document(invoke: Callable[..., Done], swept: list[Any]) -> None:
    done = invoke("run", "--prompt", NASTY, "--prompt", "two, with a comma", "--json")
    assert done.document["exit_code"] == 0
    assert done.document["outcome"]["measured"] == 3
    assert done.document["summary"]["warnings"] == ["a warning"]
    assert swept[0][0].prompts == (NASTY, "two, with a comma")


def test_an_interrupted_run_says_how_to_continue(
    invoke: Callable[..., Done], swept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparkbench.runner.run", interrupt)
    done = invoke("run", "--out", "place")
    assert (done.code, done.out) == (130, "")
    assert "finished units are kept in place: the same command continues" in done.err


def test_a_violation_is_exit_code_1(
    invoke: Callable[..., Done], swept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparkbench.runner import RunOutcome

    outcome = RunOutcome(Path("x"), 1, 1, 4, violations=1, tie_flips=0, failed=1, skipped=0, notes=())
    monkeypatch.setattr("sparkbench.runner.run", lambda *_: outcome)
    done = invoke("run")
    assert done.code == 1
    assert "1 outputs are not what autoregressive decoding returns" in done.err
    assert "1 rows failed" in done.err


def test_a_run_on_real_models(invoke: Callable[..., Done], family: tuple[str, ...], tmp_path: Path) -> None:
    target, drafter = family[:2], family[3]
    drafters = ("--drafter", f"dflash={drafter}", "--drafter", f"ddtree={drafter}")
    methods = ("--method", "dflash,ddtree", "--budget", "6")
    arguments = ("run", *target, *drafters, *methods, "--max-new-tokens", "8")
    arguments += ("--prompt", NASTY, "--prompt", "hi", "--out", str(tmp_path / "a[0]"))
    plan = invoke(*arguments, "--dry-run", "--json").document
    assert (plan["prompts"], plan["generations"]) == (2, 6)
    assert "nothing was run" in invoke(*arguments, "--dry-run").out
    assert not (tmp_path / "a[0]").exists()

    done = invoke(*arguments, "--json")
    assert (done.code, done.document["outcome"]["violations"]) == (0, 0)
    rows = {row["method"]: row for row in done.document["summary"]["rows"]}
    assert set(rows) == {"autoregressive", "dflash", "ddtree"}
    assert all(row["prompts"] == 2 for row in rows.values())
    assert rows["ddtree"]["tau"] > 1

    again = invoke(*arguments)
    assert "results in" in again.out
    assert "a[0] (0 of 1 units measured now; another --out measures again)" in again.out
    assert "2/0/0" in again.out
    other = invoke(*arguments, "--seed", "1")
    assert (other.code, other.out) == (2, "")


# train


def test_train_embedded_passes_folders_and_threads_on(
    invoke: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, Path, int]] = []

    def train(work: Path, out: Path, *, threads: int, progress: Callable[[str], None]) -> None:
        calls.append((work, out, threads))
        progress("step 1")

    monkeypatch.setattr("sparkbench.train.embedded.train", train)
    done = invoke("train", "embedded", "--out", "a/family", "--threads", "3", "--json")
    assert done.document == {"out": "a/family", "work": "a/family-work"}
    assert done.err == "step 1\n"
    assert "the family is in embedded" in invoke("train", "embedded", "--work", "b").out
    assert calls[0] == (Path("a/family-work"), Path("a/family"), 3)
    assert calls[1][:2] == (Path("b"), Path("embedded"))


def test_train_calibration_fits_and_judges_apart(invoke: Callable[..., Done], tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    options = ("--drafter", "dspark-b7", "--max-new-tokens", "32", "--dtype", "float32", "--out", str(out))
    few = invoke("train", "calibration", *options, "--limit", "1")
    assert few.code == 2
    assert "rounds to fit on are too few" in few.err
    assert not out.exists()
    document = invoke("train", "calibration", *options, "--limit", "5", "--json").document
    assert document["temperatures"] == json.loads(out.read_text())["temperatures"]
    assert len(document["temperatures"]) == 7
    assert document["rounds_fitted"] > document["rounds_judged"] >= 50
    shown = invoke("train", "calibration", *options, "--limit", "5").out
    assert shown.count("%") == 2 * 7
    headless = invoke("train", "calibration", "--drafter", "dspark-b7+none", "--out", str(out))
    assert headless.code == 2
    assert "no confidence head" in headless.err


@pytest.mark.parametrize("command", [("profile",), ("train", "calibration")])
def test_a_place_where_no_file_can_be_is_refused_before_the_work(
    invoke: Callable[..., Done], tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("x")
    for out, said in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.json", "cannot be written")):
        done = invoke(*command, "--out", str(out))
        assert done.code == 2
        assert said in done.err
        assert done.err.count("\n") == 1
