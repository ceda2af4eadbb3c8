"""`kvarto k8s …` as a person meets it: text, JSON, exit codes, and one sentence for what can't work."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvarto.cli.main import run
from kvarto.cluster.yaml_text import dump_all, load_all
from tests.cluster.manifests import correct_manifests, limits
from tests.engine.tiny_model import write_tiny_model

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    documents = correct_manifests("hami")
    limits(documents)["nvidia.com/gpumem"] = "16Gi"
    path = tmp_path / "pod.yaml"
    path.write_text(dump_all(documents))
    return path


def test_size_says_what_each_scheme_asks_for(model: str, capsys: Captured) -> None:
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--card", "H100"]
    assert run(["k8s", "size", model, *flags]) == 0
    text = capsys.readouterr().out
    assert "nvidia.com/gpu: 1, nvidia.com/gpumem: 7" in text
    assert "On `H100-80` take `--scheme" in text
    assert run(["k8s", "size", model, *flags, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["limit_bytes"] == answer["arena_bytes"] + answer["overhead_bytes"]
    assert answer["weights_bytes"] + answer["activations_bytes"] + answer["pages_bytes"] <= answer["arena_bytes"]
    assert [row["scheme"] for row in answer["schemes"]][-1] == "cpu"
    assert answer["advice"]["scheme"] in {row["scheme"] for row in answer["schemes"]}


def test_a_model_that_does_not_fit_is_exit_code_one(model: str, capsys: Captured) -> None:
    flags = ["--card", "T4", "--overhead-memory", "15GiB"]
    assert run(["k8s", "size", model, *flags]) == 1
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize("format", ["text", "markdown", "json"])
def test_compare_has_a_row_for_every_scheme(model: str, format: str, capsys: Captured) -> None:
    assert run(["k8s", "compare", model, "--card", "A100-80", "--format", format]) == 0
    text = capsys.readouterr().out
    if format == "json":
        rows = json.loads(text)
        assert len(rows) == 12
        assert {row["scheme"]: row["is_enforced"] for row in rows}["time-slicing"] is False
    elif format == "markdown":
        lines = text.splitlines()
        assert len(lines) == 14
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    else:
        assert text.count("limit enforced by") == 12
        assert "cooperation" in text


def test_mig_lists_profiles_and_packs_models(capsys: Captured) -> None:
    assert run(["k8s", "mig", "--card", "A30"]) == 0
    assert "1g.6gb+me" in capsys.readouterr().out
    assert run(["k8s", "mig", "chat=20GiB", "code=1g.6gbx3", "--card", "A30", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["is_proven"] is True
    assert len(plan["cards"]) == 2
    assert run(["k8s", "mig", "chat=20GiB", "code=1g.6gbx3", "--card", "A30"]) == 0
    assert "nvidia-smi mig -i 0 -cgi" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mig", "chat", "--card", "A30"], "`chat` is no demand"),
        (["mig", "chat=much", "--card", "A30"], "`much` is not a size"),
        (["mig", "chat=30GiB", "--card", "A30"], "the largest instance of `A30-24`"),
        (["mig", "a=1GiBx1000", "--card", "A30"], "wants 1000 instances; give 1 to 512"),
        (["mig", "a=1GiBx0", "--card", "A30"], "wants 0 instances; give 1 to 512"),
        (["mig", f"a=1GiBx{'9' * 5000}", "--card", "A30"], "wants 99999999999999999999 instances; give 1 to 512"),
        (["mig", "a=1GiBx400", "b=1GiBx400", "--card", "A30"], "800 demands are more than the 512"),
        (["mig", "--card", "B52"], "card `B52` is not in the table"),
        (["size", "MODEL", "--kubernetes", "latest"], "`--kubernetes latest` is no version"),
        (["size", "MODEL", "--aliyun-unit", "GB"], "take `GiB` or `MiB`"),
        (["size", "MODEL", "--memory-factor", "0"], "`--memory-factor 0` is too small"),
        (["size", "MODEL", "--device-memory", "8GiB"], "is what `kvarto k8s` works out"),
        (["compare", "MODEL", "--format", "csv"], "take one of text, markdown, json"),
        (["render", "MODEL", "--scheme", "cgpu"], "`--scheme cgpu` is unknown"),
        (["render", "MODEL", "--scheme", "mig"], "name it, such as `--card H100-80`"),
        (["render", "MODEL", "--scheme", "hami", "--name", "Chat"], "`--name Chat` is no name"),
        (["render", "MODEL", "--scheme", "cpu", "--name", "1chat"], "digits and dashes, a letter first"),
        (["render", "MODEL", "--scheme", "cpu", "--namespace", "a.b"], "`--namespace a.b` is no name"),
        (["render", "MODEL", "--scheme", "cpu", "--image", "my image"], "`--image my image` is no name"),
        (["render", "MODEL", "--scheme", "cpu", "--model-claim", "My_Claim"], "`--model-claim My_Claim` is no name"),
        (["render", "MODEL", "--scheme", "cpu", "--runtime-class", ""], "`--runtime-class ` is no name"),
        (["render", "MODEL", "--scheme", "kai", "--queue", "team a"], "`--queue team a` is no name"),
        (["size", "MODEL", "--tokens-per-seq", "0"], "`--tokens-per-seq 0` is no load"),
        (["size", "MODEL", "--device-class", "GPU"], "`--device-class GPU` is no name"),
        (["render", "MODEL", "--scheme", "hami", "--limiter"], "limits already"),
        (["render", "MODEL", "--scheme", "hami", "--backend", "native"], "computes on a CPU"),
        (["check", "/nowhere.yaml"], "`/nowhere.yaml` can't be read"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    arguments: list[str], says: str, model: str, capsys: Captured
) -> None:
    assert run(["k8s", *(model if word == "MODEL" else word for word in arguments)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_render_prints_what_check_accepts(model: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "kvarto.yaml"
    flags = ["--max-num-seqs", "3", "--no-enable-prefix-caching", "--pod-model", "/models/mine", "--namespace", "chat"]
    assert run(["k8s", "render", model, "--scheme", "kai", "--limiter", "--output", str(path), *flags]) == 0
    deployment = next(each for each in load_all(path.read_text()) if each["kind"] == "Deployment")
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    assert server["args"][:2] == ["serve", "/models/mine"]
    assert server["args"][-3:] == ["--max-num-seqs", "3", "--no-enable-prefix-caching"]
    assert {"name": "LD_PRELOAD", "value": "/usr/local/lib/libkvarto-limiter.so"} in server["env"]
    assert run(["k8s", "check", str(path), "--card", "H100"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert run(["k8s", "render", model, "--scheme", "cpu", "--namespace", "1" * 63]) == 0
    printed = capsys.readouterr()
    assert "- cpu\n" in printed.out
    assert "is a path on this machine" in printed.err, "the pod would look for it in its own file system"


@pytest.mark.parametrize("command", [["size"], ["mig"], ["render"], ["compare"], ["check"], ["limiter", "status"]])
def test_every_command_has_help(command: list[str], capsys: Captured) -> None:
    assert run(["k8s", *command, "--help"]) == 0
    assert f"Usage: kvarto k8s {' '.join(command)}" in capsys.readouterr().out


def test_check_is_for_continuous_integration(wrong: Path, capsys: Captured) -> None:
    assert run(["k8s", "check", str(wrong), "--card", "H100"]) == 1
    line = capsys.readouterr().out
    assert line.startswith(f"{wrong}: error: Deployment kvarto, container server: `nvidia.com/gpumem: 16Gi` asks for")
    assert line.count("\n") == 1
    assert run(["k8s", "check", str(wrong.parent), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert {finding["rule"] for finding in findings} == {"memory-unit"}
    assert all(finding["file"] == str(wrong) and finding["edits"] for finding in findings)


def test_check_shows_and_writes_corrections(wrong: Path, capsys: Captured) -> None:
    before = wrong.read_text()
    assert run(["k8s", "check", str(wrong), "--diff"]) == 1
    shown = capsys.readouterr().out
    assert "-            nvidia.com/gpumem: 16Gi" in shown
    assert "+            nvidia.com/gpumem: 16384" in shown
    assert wrong.read_text() == before
    assert run(["k8s", "check", str(wrong), "--fix"]) == 1
    assert wrong.read_text() != before
    assert run(["k8s", "check", str(wrong), "--card", "H100"]) == 0


def test_a_folder_without_manifests_does_not_pass(tmp_path: Path, wrong: Path, capsys: Captured) -> None:
    (tmp_path / "outer/inner").mkdir(parents=True)
    wrong.rename(tmp_path / "outer/inner/pod.yaml")
    assert run(["k8s", "check", str(tmp_path / "outer")]) == 2
    assert "folders below it are named one by one" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said(
    wrong: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert run(["k8s", "check", str(wrong), "--fix"]) == 2
    assert "can't be written: Permission denied" in capsys.readouterr().err


POD = """\
apiVersion: v1
kind: Pod
metadata: {name: chat}
spec:
  containers:
  - {name: a, image: x, resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 16Gi}}}
"""
RIGHT = POD.replace("16Gi", "16384")
ODD = RIGHT.replace("metadata: {", "metadata:   {   ")


@pytest.mark.parametrize(
    "text",
    [
        f"# licence\n---\n{POD}", f"{POD}---\n# nothing\n", f"# a\n\n---\n# b\n---\n---\n# c\n{POD}# d\n---\n# e",
        f"---\n{ODD}---\n# second\n{POD}---\n{ODD}", f"%YAML 1.2\n---\n{POD}...\n", f"{ODD}...\n---\n{POD}",
    ],
)  # fmt: skip
def test_what_was_right_stays_letter_by_letter(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    assert run(["k8s", "check", str(path), "--fix"]) == 1
    assert path.read_text() == text.replace("16Gi", "16384").removesuffix("...\n")


@pytest.mark.parametrize("form", ["json", "offset", "start", "lines"])
def test_corrections_keep_the_form_of_a_file(form: str, tmp_path: Path) -> None:
    text = """\
apiVersion: v1
kind: Pod
metadata:
  name: chat
spec:
  containers:
    - name: a
      image: x
      resources:
        limits:
          nvidia.com/gpu: 1
          nvidia.com/gpumem: 16Gi
"""
    if form == "json":
        text = json.dumps(load_all(text)[0], indent=2) + "\n"
    if form == "start":
        text = f"---\n# first\n{text}---\n{text}"
    if form == "lines":
        text = text.replace("\n", "\r\n").replace("  containers", "  # which\r\n  containers")
    path = tmp_path / ("pod.json" if form == "json" else "pod.yaml")
    path.write_bytes(text.encode())
    assert run(["k8s", "check", str(path), "--fix"]) == 1
    assert path.read_bytes().decode() == text.replace('"16Gi"', "16384").replace("16Gi", "16384")


def test_check_reads_standard_input(wrong: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(wrong.read_text()))
    assert run(["k8s", "check", "--fix"]) == 1
    printed = capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO(printed.out))
    assert run(["k8s", "check", "-"]) == 0
    assert "[memory-unit]" in printed.err
    monkeypatch.setattr("sys.stdin", io.StringIO("just: text\n"))
    assert run(["k8s", "check"]) == 2
