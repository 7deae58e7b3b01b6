"""What a stranger gets: the wheel in an environment with nothing but its requirements."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import conserved
from conserved.cli.app import LOSSES
from conserved.inference.infer import LOSSES as RECOGNISED_LOSSES
from conserved.optional import EXTRAS
from wheel_environment import DEMO_EXTRAS, PAPERS, PROJECTS, ROOT, Environment, build, required

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

WITHOUT = {
    "TensorBoard": ("import conserved; conserved.tracking.TensorBoard('x')", "tensorboard"),
    "trackio": ("import conserved; conserved.tracking.Trackio()", "trackio"),
    "Weights & Biases": ("import conserved; conserved.tracking.WeightsAndBiases()", "wandb"),
    "live table": ("import conserved; conserved.store.LiveTable()", "cli"),
    "certificate": ("import conserved; conserved.certify", "certify"),
    "report": ("import conserved; conserved.report", "report"),
    "Trainer": ("from conserved.integrations import ConservationCallback", "hf"),
    "Lightning": ("from conserved.integrations import LightningConservation", "lightning"),
    "figure": ("import conserved; conserved.attention.coherence_figure({'run': None}, 'x.svg')", "plots"),
}
"""Each optional feature, and the extra that brings what it needs."""

WITHOUT_PAPERS = ("import conserved; conserved.claims", "from conserved.blocks import Attention")
"""What another distribution brings."""

WITHOUT_PAPERS_EXTRAS = {
    "data": "from conserved_papers.lab.data.embedded import digits; digits()",
    "ray": "from conserved_papers.lab.places import Ray; list(Ray('local').run([], folder=None))",
}
"""Features of the second distribution by the extra that brings what they need."""


def test_the_wheel_is_typed_complete_and_licensed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    files = [path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    missing = {path.relative_to(source).as_posix() for path in files} - names
    assert not missing
    assert "conserved/py.typed" in names
    assert not [name for name in names if name.startswith("conserved_papers")], "that is a distribution of its own"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_wheel_of_the_papers_is_complete_and_holds_nothing_else(papers_wheel: Path) -> None:
    names = set(zipfile.ZipFile(papers_wheel).namelist())
    files = [path for path in (PAPERS / "src").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {path.relative_to(PAPERS / "src").as_posix() for path in files}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build(tmp_path / "sdist", "sdist")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "open", filter="data")
    (folder,) = (tmp_path / "open").iterdir()
    again = build(tmp_path / "again", source=folder)
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_no_optional_package_is_among_the_requirements() -> None:
    assert {Requirement(line).name for line in PROJECT["dependencies"]} == {"torch", "numpy", "scipy", "jaxtyping"}
    assert required().isdisjoint({"rich", "typer", "python-flint", "latex2mathml", "transformers", "matplotlib"})


def test_the_demonstration_installs_the_extras_that_are_tested_here() -> None:
    extras = f'-e ".[{",".join(DEMO_EXTRAS)}]" -e papers'
    assert extras in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", EXTRAS)
def test_an_extra_that_is_named_brings_the_package(package: str) -> None:
    requirement = Requirement(EXTRAS[package])
    project = tomllib.loads(PROJECTS[canonicalize_name(requirement.name)].read_text(encoding="utf-8"))["project"]
    if not requirement.extras:
        assert package == project["name"]
        return
    [extra] = requirement.extras
    listed = project["optional-dependencies"][extra]
    names = {"sklearn": "scikit-learn", "PIL": "pillow", "flint": "python-flint"}
    assert any(Requirement(line).name == names.get(package, package) for line in listed)


def test_every_public_name_is_there_and_warns_of_nothing(core: Environment, tmp_path: Path) -> None:
    code = (
        "import conserved, sys\nfor name in conserved.__all__: getattr(conserved, name)\nprint(conserved.__file__)\n"
        "import torch\nmodel = conserved.blocks.Attention(4, 2)\nconserved.recognize(model)\n"
        "assert conserved.discover(model, torch.zeros(5, 4)).complete\n"
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    shown = core.run(core.python, "-W", "error", "-c", code, at=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(str(core.folder))
    assert shown.stdout.endswith("[]\n"), "reading laws off, and counting them, does not wait for PyTorch's compiler"


def test_the_version_is_that_of_the_package(core: Environment, tmp_path: Path) -> None:
    assert core.run("conserved", "--version", at=tmp_path).stdout == f"conserved {conserved.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", conserved.__version__), "semantic versioning"
    assert f"version: {conserved.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("laws", "--help"), ("certify", "--help")], ids=" ".join
)
def test_help_waits_for_neither_pytorch_nor_extras(core: Environment, tmp_path: Path, words: tuple[str, ...]) -> None:
    code = (
        "import sys; sys.argv = ['conserved', *sys.argv[1:]]\nfrom conserved.cli import main\n"
        "try: main()\n"
        "finally: print(*{'torch', 'numpy', 'flint'}.intersection(sys.modules), file=sys.stderr)"
    )
    shown = core.run(core.python, "-c", code, *words, at=tmp_path)
    assert shown.returncode == 0
    assert shown.stderr.strip() == "", "loaded for nothing"
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())


@pytest.mark.parametrize("words", [("laws", "timm:create_model"), ("laws", "x:y", "--store", "no/x.db")], ids=" ".join)
def test_what_can_be_refused_at_once_waits_for_no_pytorch(
    core: Environment, tmp_path: Path, words: tuple[str, ...]
) -> None:
    code = (
        "import sys; sys.argv = ['conserved', *sys.argv[1:]]\nfrom conserved.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    shown = core.run(core.python, "-c", code, *words, at=tmp_path)
    assert shown.returncode == 2, shown.stderr
    assert shown.stdout == "False\n"


def test_the_shell_completes_commands(core: Environment, tmp_path: Path) -> None:
    shown = core.run(
        "conserved", at=tmp_path, _CONSERVED_COMPLETE="complete_bash", COMP_WORDS="conserved dis", COMP_CWORD="1"
    )
    assert shown.stdout.split() == ["discover"]
    script = core.run(
        "conserved", "--show-completion", "bash", at=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert "complete" in script.stdout


TRY_EACH = """
import sys
for code in sys.stdin.read().splitlines():
    try:
        exec(code, {})
    except ImportError as problem:
        print(problem)
    else:
        print("nothing was missing:", code)
"""


USES = """
import sys, warnings
import torch, conserved
from torch import nn

warnings.simplefilter("error")
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(5, 3)
laws = conserved.recognize(model, x)
print(laws.summary())
monitor = conserved.Monitor(model, optimizer, laws, sinks="run.jsonl")
model(x).square().sum().backward()
assert conserved.audit(model, laws).ok
optimizer.step()
monitor.step()
monitor.close()
assert conserved.check(torch.nn.functional.silu, x).ok
assert conserved.discover(model, x).count == 4
print(conserved.transform.fingerprint(model, x))
print(sorted({"rich", "typer", "flint", "latex2mathml"} & set(sys.modules)))
"""


def test_a_plain_install_recognizes_audits_checks_watches_and_counts(plain: Environment, tmp_path: Path) -> None:
    shown = plain.run(plain.python, "-c", USES, at=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.endswith("[]\n")


def test_the_command_of_a_plain_install_names_its_extra(plain: Environment, tmp_path: Path) -> None:
    shown = plain.run("conserved", "--help", at=tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.endswith("Install it: pip install 'conserved[cli]'.\n")
    assert len(shown.stderr.splitlines()) == 1


def test_features_without_their_extra_say_in_one_line_what_to_install(plain: Environment, tmp_path: Path) -> None:
    shown = plain.run(plain.python, "-c", TRY_EACH, at=tmp_path, text="\n".join(code for code, _ in WITHOUT.values()))
    lines = shown.stdout.splitlines()
    assert len(lines) == len(WITHOUT), shown.stderr
    for line, (_, extra) in zip(lines, WITHOUT.values(), strict=True):
        assert line.endswith(f"Install it: pip install 'conserved[{extra}]'.")


def test_without_the_papers_their_parts_name_the_distribution(plain: Environment, tmp_path: Path) -> None:
    shown = plain.run(plain.python, "-c", TRY_EACH, at=tmp_path, text="\n".join(WITHOUT_PAPERS))
    lines = shown.stdout.splitlines()
    assert len(lines) == len(WITHOUT_PAPERS), shown.stderr
    for line in lines:
        assert "needs conserved_papers" in line
        assert line.endswith("Install it: pip install conserved_papers.")


def test_parts_of_the_papers_without_their_extra_name_it(core: Environment, tmp_path: Path) -> None:
    shown = core.run(core.python, "-c", TRY_EACH, at=tmp_path, text="\n".join(WITHOUT_PAPERS_EXTRAS.values()))
    for line, extra in zip(shown.stdout.splitlines(), WITHOUT_PAPERS_EXTRAS, strict=True):
        assert line.endswith(f"Install it: pip install 'conserved_papers[{extra}]'.")


@pytest.mark.parametrize("model", ["transformers:LlamaConfig", "timm:create_model", "config.json"])
def test_the_command_without_an_extra_says_in_one_line_what_to_install(
    core: Environment, tmp_path: Path, model: str
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    shown = core.run("conserved", "laws", model, at=tmp_path)
    extra = "timm" if model.startswith("timm") else "hf"
    assert shown.returncode == 2
    assert len(shown.stderr.strip().splitlines()) == 1
    assert f"pip install 'conserved[{extra}]'" in shown.stderr


def test_the_commands_work_on_requirements_alone(core: Environment, tmp_path: Path) -> None:
    block = ("conserved.blocks:SwiGLU", "dim=3", "hidden=4", "--inputs", "5,3")
    counted = core.run("conserved", "discover", *block, at=tmp_path)
    assert "VERIFIED: 4 independent laws of 36 parameters, all found." in counted.stdout, counted.stderr
    proved = core.run("conserved", "certify", *block, at=tmp_path)
    assert "PROVED: Exactly 4 independent laws of 36 parameters, all listed." in proved.stdout, proved.stderr


def test_importing_everything_takes_less_than_half_of_the_time_of_pytorch(core: Environment, tmp_path: Path) -> None:
    """A share, because on a busy core both take longer."""
    code = (
        "import time; begun = time.process_time()\nimport torch; between = time.process_time()\nimport conserved\n"
        "for name in conserved.__all__: getattr(conserved, name)\n"
        "print((time.process_time() - between) / (between - begun))"
    )
    shares: list[float] = []
    while len(shares) < 3 and min(shares, default=1) >= 0.5:
        shares.append(float(core.run(core.python, "-c", code, at=tmp_path).stdout))
    assert min(shares) < 0.5


def test_names_for_type_checkers_are_the_names_that_are_loaded() -> None:
    tree = ast.parse((ROOT / "src/conserved/__init__.py").read_text(encoding="utf-8"))
    typed, _ = (node for node in tree.body if isinstance(node, ast.If))
    text = {
        alias.name: item.module or "" for item in typed.body if isinstance(item, ast.ImportFrom) for alias in item.names
    }
    assert {*text, "__version__"} == set(conserved.__all__)
    for name, module in text.items():
        home = importlib.import_module(f"{module}.{name}" if module == "conserved" else module)
        assert getattr(conserved, name) is (home if module == "conserved" else getattr(home, name))


def test_the_command_knows_the_losses_of_the_library() -> None:
    assert LOSSES == RECOGNISED_LOSSES


def test_a_type_checker_outside_sees_the_public_names(core: Environment, tmp_path: Path) -> None:
    """The file is someone else's program; PyTorch's own types are not the question and would take a minute."""
    program = ROOT / "tests" / "outside_program.py.txt"
    (tmp_path / "program.py").write_text(program.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\ncache_dir = cache\n[mypy-torch.*,numpy.*,flint.*,rich.*]\nfollow_imports = skip\n"
    )
    used = {
        node.attr
        for node in ast.walk(ast.parse(program.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert set(conserved.__all__) <= used
    command = [sys.executable, "-m", "mypy", "--python-executable", str(core.python), "program.py"]
    good = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert good.returncode == 0, good.stdout
    wrong = program.read_text(encoding="utf-8").replace("laws.independent()", "laws.indepndent()")
    (tmp_path / "program.py").write_text(wrong, encoding="utf-8")
    (tmp_path / "program.py").write_text(f"{wrong}\nprint(conserved.chekc)\n", encoding="utf-8")
    bad = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert 'has no attribute "indepndent"' in bad.stdout
    assert 'has no attribute "chekc"' in bad.stdout
