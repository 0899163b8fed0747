"""The registry: names, variants, errors, plug-ins, and that listing stays light."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from sparkbench import registry
from sparkbench.decoding.method import Context, Method
from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import UsageError
from sparkbench.registry import Variant, build, get, names

PLUGIN = """
from sparkbench.decoding.method import Method
from sparkbench.decoding.tree import DraftTree
from sparkbench.registry import method


@method("shiny")
class Shiny(Method):
    summary = "a method of another package"
    max_nodes = 0

    def propose(self, context):
        return DraftTree.root(context.anchors)
"""


@dataclass(frozen=True)
class Options:
    """One of each kind."""

    text: str = ""
    whole: int = 3
    real: float = 0.5
    flag: bool = False
    choice: Literal["a", "b"] = "a"
    number: Literal[1, 2] = 1
    maybe: int | None = None
    two_words: int = 0

    def __post_init__(self) -> None:
        if self.whole > 99:
            raise ValueError("whole is above 99")


class Kinds(Method):
    """A method with options of every kind."""

    Options = Options
    name = "kinds"
    summary = "for tests"

    @property
    def max_nodes(self) -> int:
        return 0

    def propose(self, context: Context) -> DraftTree:
        return DraftTree.root(context.anchors)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.get
    monkeypatch.setattr(registry, "get", lambda name: Kinds if name == "kinds" else known(name))


def test_names() -> None:
    assert names()[0] == "autoregressive"
    assert {"dflash", "ddtree"} <= set(names())
    assert names()[1:] == sorted(names()[1:])
    for name in names():
        found = get(name)
        assert found.name == name
        assert found.summary
        assert "\n" not in found.summary


def test_alias() -> None:
    assert get("ar") is get("autoregressive")
    assert Variant.parse("ar") == Variant.parse("autoregressive") == Variant("autoregressive")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("ddtree", "ddtree"),
        (" ddtree ", "ddtree"),
        ("ddtree:builder=auto", "ddtree"),
        ("ddtree:builder=heap", "ddtree:builder=heap"),
        ("ddtree:drafter=b16:builder=heap", "ddtree:builder=heap:drafter=b16"),
        (r"dflash:drafter=C:\models\one", r"dflash:drafter=C:\models\one"),
        ("dflash:drafter=", "dflash"),
        ("kinds", "kinds"),
        ("kinds:whole=03:real=0.50:flag=FALSE", "kinds"),
        ("kinds:flag=True:whole=7:real=1", "kinds:flag=true:real=1.0:whole=7"),
        ("kinds:choice=b:number=2:maybe=5", "kinds:choice=b:maybe=5:number=2"),
        ("kinds:two_words=4", "kinds:two-words=4"),
        ("kinds:two-words=4", "kinds:two-words=4"),
    ],
)
@pytest.mark.usefixtures("kinds")
def test_canonical(text: str, canonical: str) -> None:
    variant = Variant.parse(text)
    assert variant.canonical == canonical
    assert Variant.parse(canonical) == variant
    assert variant == Variant(variant.method, tuple(sorted(variant.options)))


@pytest.mark.usefixtures("kinds")
def test_typed_options() -> None:
    options = Variant.parse("kinds:text=a=b:whole=-2:real=1e-3:flag=true:choice=b:number=2:maybe=7").typed_options()
    assert options == Options("a=b", -2, 1e-3, True, "b", 2, 7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "autoregressive, dart, ddtree, dflash"),
        ("", "known: autoregressive"),
        ("ddtree:size=3", "known: budget, builder, curve, depth, draft-noise"),
        ("ddtree:heap", "known: budget, builder, curve, depth, draft-noise"),
        ("ddtree:builder=fast", "level, heap"),
        ("ddtree:builder=heap:builder=level", "twice"),
        ("ar:drafter=x", "known: none"),
        ("kinds:whole=1.5", "a whole number"),
        ("kinds:real=much", "a number"),
        ("kinds:flag=1", "true or false"),
        ("kinds:choice=c", "a, b"),
        ("kinds:number=3", "1, 2"),
        ("kinds:whole=100", "above 99"),
    ],
)
@pytest.mark.usefixtures("kinds")
def test_errors_say_what_exists(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Variant.parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_build() -> None:
    drafter = object()
    tree = build(Variant.parse("ddtree:builder=heap"), drafter=drafter, budget=9)
    assert (tree.budget, tree.drafter, tree.options.builder, tree.max_nodes) == (9, drafter, "heap", 9)
    assert build(Variant.parse("dflash"), drafter=drafter, budget=9).budget is None
    assert build(Variant.parse("ar")).max_nodes == 0


def plug_in(folder: Path, entry: str, source: str = PLUGIN) -> None:
    """A distribution as an installer would leave it."""
    (folder / "shiny_package.py").write_text(source)
    info = folder / "shiny_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shiny-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sparkbench.methods]\n{entry}\n")


def test_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(tmp_path, "shiny = shiny_package:Shiny")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "shiny" in names()
    assert "shiny_package" not in sys.modules, "listing must not import"
    assert get("shiny").summary == "a method of another package"
    assert Variant.parse("shiny").canonical == "shiny"
    assert build(Variant.parse("shiny")).max_nodes == 0
    monkeypatch.delitem(sys.modules, "shiny_package")


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("shiny = shiny_package:Missing", PLUGIN),
        ("shiny = absent_package:Shiny", PLUGIN),
        ("shiny = shiny_package:Shiny", "import absent_thing\n"),
        ("other = shiny_package:Shiny", PLUGIN),
    ],
)
def test_broken_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, source: str) -> None:
    """One line that names it, and no harm to the other methods."""
    plug_in(tmp_path, entry, source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shiny_package", raising=False)
    name = entry.split()[0]
    assert name in names()
    assert get("dflash").name == "dflash"
    with pytest.raises(UsageError, match=name) as caught:
        get(name)
    assert "\n" not in str(caught.value)
    sys.modules.pop("shiny_package", None)


def test_listing_is_light() -> None:
    """Names come without torch or any method."""
    code = (
        "import sys; from sparkbench import registry; assert 'ddtree' in registry.names(); "
        "assert not {'torch', 'transformers', 'sparkbench.methods.ddtree'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
