"""What makes a release: its version and notes, the workflows, the audit, and the source distribution."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import audit
import pytest
import release
import yaml
from packaging.requirements import Requirement

import qwen_megakernel
import spoken_text

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAIN, MORE = "qwen_megakernel/__init__.py", "packages/spoken-text/spoken_text/__init__.py"
PACKAGE = '"""A package."""\n\n__version__ = "1.2.3"\n'
CHANGELOG = "# Changelog\n\n## [1.2.3] - 2026-01-02\n\n### Added\n\n- A thing.\n\n## [1.2.2] - 2026-01-01\n\n- Old.\n"


# ---------------------------------------------------------------- one version


def test_the_notes_of_a_release_are_its_part_of_the_changelog():
    assert release.notes("v1.2.3", {MAIN: PACKAGE, MORE: PACKAGE}, CHANGELOG) == "### Added\n\n- A thing."


@pytest.mark.parametrize(
    "tag, changes, expected",
    [
        ("1.2.3", {}, "expected a tag such as v1.2.3"),
        ("v1.2.4", {}, f"the tag is v1.2.4, but __version__ of {MAIN} is 1.2.3"),
        ("v1.2.3", {'__version__ = "1.2.3"': ""}, f"but __version__ of {MAIN} is None"),
        ("v1.2.3", {"## [1.2.3] - 2026-01-02": "## [Unreleased]"}, "CHANGELOG.md begins with [Unreleased]"),
        ("v1.2.3", {"## [1.2.3] - 2026-01-02\n": "## [1.2.4] - 2026-01-02\n"}, "CHANGELOG.md begins with [1.2.4]"),
        ("v1.2.3", {" - 2026-01-02": ""}, "has no date"),
        ("v1.2.3", {"### Added\n\n- A thing.\n": ""}, "has no changes"),
    ],
)
def test_a_version_that_is_named_in_two_ways_is_not_released(tag, changes, expected):
    package, changelog = PACKAGE, CHANGELOG
    for old, new in changes.items():
        package, changelog = package.replace(old, new), changelog.replace(old, new)
    with pytest.raises(release.NotReadyError, match=re.escape(expected)):
        release.notes(tag, {MAIN: package}, changelog)


def test_all_packages_must_have_the_tags_version():
    packages = {MAIN: PACKAGE, MORE: PACKAGE.replace("1.2.3", "1.2.2")}
    with pytest.raises(release.NotReadyError, match=f"the tag is v1.2.3, but __version__ of {MORE} is 1.2.2"):
        release.notes("v1.2.3", packages, CHANGELOG)


@pytest.mark.parametrize("path", sorted(ROOT.glob("packages/*/pyproject.toml")), ids=lambda path: path.parent.name)
def test_packages_need_versions_of_each_other_that_there_are(path):
    """Each names a range below the next minor version, which the version in this checkout fits."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    versions = {"qwen-megakernel": qwen_megakernel.__version__, "spoken-text": spoken_text.__version__}
    for needed in map(Requirement, PROJECT["dependencies"] + project["dependencies"]):
        if version := versions.get(needed.name):
            assert needed.specifier.contains(version) and not needed.specifier.contains("1.0"), needed
    assert project["requires-python"] == PROJECT["requires-python"] and project["license"] == PROJECT["license"]
    assert (path.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (path.parent / project["name"].replace("-", "_") / "py.typed").exists()


def test_the_newest_version_of_the_changelog_is_the_packages():
    named = release.HEADING.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert next(name for name in named if name != "Unreleased") == qwen_megakernel.__version__


def test_the_command_says_why_it_refuses():
    done = subprocess.run([sys.executable, "tools/release.py", "v0.0.1"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"cannot release: the tag is v0.0.1, but __version__ of {MAIN} is ")


# ---------------------------------------------------------------- the workflows


def jobs() -> dict[str, dict]:
    return {
        f"{path.stem} {name}": job
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items()
    }


def test_each_action_is_named_by_its_commit_and_says_which_version_that_is():
    lines = [line for path in WORKFLOWS for line in path.read_text(encoding="utf-8").splitlines() if " uses:" in line]
    assert len(lines) > 20
    for line in lines:
        assert re.search(r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line
    assert len({line.split("uses: ")[1] for line in lines}) == len(
        {line.split("uses: ")[1].split("@")[0] for line in lines}
    )


def test_each_job_has_its_own_few_rights_and_an_end():
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {}, path.name
    for name, job in jobs().items():
        assert "permissions" in job and job["timeout-minutes"] <= 60, name
        for step in job["steps"]:
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False, name
    writers = {name for name, job in jobs().items() for right in job["permissions"].values() if right == "write"}
    assert writers == {f"release {name}" for name in ("attest", "publish", "image", "pages", "release")}
    for name in writers:  # nothing of this repository or of an index runs there, but for uv and the image's build
        commands = "".join(step.get("run", "") for step in jobs()[name]["steps"])
        assert "make " not in commands and "python tools/" not in commands, name


def test_a_tag_is_checked_before_anything_is_built_and_all_is_tested_before_anything_is_published():
    needs = {name: job.get("needs", []) for name, job in jobs().items() if name.startswith("release ")}
    commands = [step.get("run", "") for step in jobs()["release build"]["steps"]]
    (check,) = (n for n, command in enumerate(commands) if "tools/release.py" in command)
    assert commands[check].startswith('python tools/release.py "$GITHUB_REF_NAME"')
    assert check < commands.index("make dist")

    def before(name: str) -> set[str]:
        direct = needs[name] if isinstance(needs[name], list) else [needs[name]]
        return {f"release {n}" for n in direct}.union(*(before(f"release {n}") for n in direct))

    for name in needs.keys() - {"release build", "release test"}:
        assert {"release build", "release test"} <= before(name), name


def test_a_failed_check_of_the_tag_ends_the_step():
    """A pipe would hide it: GitHub's bash has pipefail only where the shell is named."""
    for name, job in jobs().items():
        for step in job["steps"]:
            if "tools/release.py" in step.get("run", ""):
                assert "|" not in step["run"], name


def test_the_same_pythons_are_promised_and_tested():
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert PROJECT["requires-python"] == f">={promised[0]}"
    matrices = {name: job["strategy"]["matrix"] for name, job in jobs().items() if "strategy" in job}
    tested = {name: matrix["python"] for name, matrix in matrices.items() if "python" in matrix}
    assert tested == dict.fromkeys(("ci quick", "release test"), promised)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^PYTHONS \?= (.*)$", makefile, re.M)[1].split() == [f"python{version}" for version in promised]


def test_one_version_of_uv_is_used():
    files = [ROOT / "Makefile", *WORKFLOWS]
    assert len({pin for path in files for pin in re.findall(r"\buv==[\d.]+", path.read_text(encoding="utf-8"))}) == 1


# ---------------------------------------------------------------- known holes


def answers(monkeypatch, *answers: tuple[int, str, str]) -> list[list[str]]:
    """pip-audit gives these answers, (status, standard output, standard error); what it was asked."""
    asked, left = [], list(answers)
    monkeypatch.setattr(audit, "installed", lambda python: ["torch==2.13.0"])

    def answer(requirements: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(requirements)
        return subprocess.CompletedProcess([], *left.pop(0))

    monkeypatch.setattr(audit, "pip_audit", answer)
    return asked


FOUND = 1, "pyyaml 5.3 CVE-2020-14343 5.4", "Found 1 known vulnerability"


def test_without_an_advisory_service_nothing_counts_as_audited(monkeypatch, capsys):
    unknown = 1, "", "WARNING\nERROR: pyyaml: Dependency not found and could not be audited"
    asked = answers(monkeypatch, unknown)
    assert audit.main("python") == 2
    assert asked == [[audit.KNOWN]]
    assert "nothing was audited: no advisory service can be reached from here" in (said := capsys.readouterr().err)
    assert said.endswith("could not be audited\n")


@pytest.mark.parametrize(
    "second, status", [((0, "", "No known vulnerabilities found"), 0), ((1, "torch 2.13.0 CVE-1", "Found 1"), 1)]
)
def test_with_a_service_every_package_is_asked_about(monkeypatch, capsys, second, status):
    asked = answers(monkeypatch, FOUND, second)
    assert audit.main("python") == status
    assert asked == [[audit.KNOWN], ["torch==2.13.0"]]
    said = capsys.readouterr()
    assert (second[1] or second[2]) in said.out + said.err


def test_a_build_of_a_version_is_asked_about_as_that_version():
    listed = audit.installed(sys.executable)
    assert not [line for line in listed if "+" in line or "==" not in line]
    assert any(line.startswith("torch==") for line in listed)


# ---------------------------------------------------------------- the source distribution


@pytest.mark.slow
def test_the_source_distribution_makes_the_wheel_that_the_checkout_makes(tmp_path):
    def build(kind: str, place: Path) -> Path:
        out = tmp_path / f"{place.name}-{kind}"
        command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)]
        subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=300)
        (made,) = out.iterdir()
        return made

    with tarfile.open(sdist := build("sdist", ROOT)) as archive:
        archive.extractall(tmp_path, filter="data")
    assert sdist.stat().st_size < 20_000_000
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    left_out = {".github", ".ci", ".venv", "integrations", "packages", "dist"}
    assert not left_out & {path.name for path in unpacked.iterdir()}
    wheels = [zipfile.ZipFile(build("wheel", place)) for place in (ROOT, unpacked)]
    ours, theirs = ({name: wheel.read(name) for name in wheel.namelist()} for wheel in wheels)
    assert ours == theirs
    assert "qwen_megakernel/py.typed" in ours
