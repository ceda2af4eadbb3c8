"""`kvarto k8s check FILE…`: one message for each mistake in manifests, and the manifests put right."""

from __future__ import annotations

import difflib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvarto.cli.flags import takes
from kvarto.cli.k8s_flags import ClusterConfig, OverheadConfig, cluster_options
from kvarto.core.errors import UsageError

if TYPE_CHECKING:
    from kvarto.cluster.check import Finding

RIGHT, WRONG = 0, 1
STDIN = "-"


@takes(cluster=ClusterConfig, overhead=OverheadConfig)
def k8s_check(
    files: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = (),
    *,
    cluster: ClusterConfig,
    overhead: OverheadConfig,
    fix: bool = False,
    diff: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Find what is wrong with manifests of pods on shared GPUs. All files are looked at together.

    Exit code 0: nothing, or warnings alone; 1: mistakes, also where they were put right; 2: files that can't be read.

    Parameters
    ----------
    files
        YAML or JSON files, folders of them, or `-` for standard input.
    fix
        Write the corrected files; for standard input, print them.
    diff
        Print what `--fix` would change.
    as_json
        Print the findings as JSON, with their edits.
    """
    from kvarto.cluster.check import Severity, check, correct
    from kvarto.cluster.yaml_text import dump_all

    options = cluster_options(cluster, overhead)
    files = files or (STDIN,)
    sources = _read(files)
    documents = [document for source in sources for document in source.documents]
    findings = check(documents, options)
    places = [source.name for source in sources for _ in source.documents]
    if fix or diff:
        fixed, _ = correct(documents, options)
        for source in sources:
            mine = [fixed.pop(0) for _ in source.documents]
            source.put(source.write(mine) if dump_all(mine) != dump_all(source.documents) else source.text, writes=fix)
    if as_json:
        listed = [{"file": places[each.document], **each.as_dict()} for each in findings]
        print(json.dumps(listed, indent=2, default=str))
    else:
        for each in findings:
            print(_line(places[each.document], each), file=sys.stderr if fix and STDIN in files else sys.stdout)
    return WRONG if any(each.severity is Severity.ERROR for each in findings) else RIGHT


@dataclass(slots=True)
class _Source:
    """A file, or standard input."""

    name: str
    text: str
    documents: list[Any]

    def write(self, documents: list[Any]) -> str:
        """Documents in the form of this text: JSON, or YAML with its habits."""
        from kvarto.cluster.yaml_text import rewrite

        if self.text.lstrip().startswith("{") and len(documents) == 1:
            text = json.dumps(documents[0], indent=2, default=str) + "\n"
        else:
            text = rewrite(_lines(self.text), self.documents, documents)
        return text.replace("\n", "\r\n") if "\r\n" in self.text else text

    def put(self, text: str, *, writes: bool) -> None:
        """Write the corrected text where this one came from, or print how they differ."""
        if not writes:
            lines = difflib.unified_diff(self.text.splitlines(True), text.splitlines(True), self.name, self.name)
            sys.stdout.writelines(lines)
        elif self.name == STDIN:
            sys.stdout.write(text)
        elif text != self.text:
            try:
                Path(self.name).write_bytes(text.encode())
            except OSError as error:
                raise UsageError(f"`{self.name}` can't be written: {error.strerror}") from error


def _read(names: tuple[str, ...]) -> list[_Source]:
    from kvarto.cluster.yaml_text import load_all

    sources = []
    for name in _expanded(names):
        try:
            text = sys.stdin.read() if name == STDIN else Path(name).read_bytes().decode()  # ends of lines as they are
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"`{name}` can't be read: {error}") from error
        sources.append(_Source(name, text, load_all(_lines(text), name)))
    return sources


def _lines(text: str) -> str:
    """With ends of lines as they are written here; a comment would keep half of the others'."""
    return text.replace("\r\n", "\n")


def _expanded(names: tuple[str, ...]) -> list[str]:
    """Folders stand for the manifests in them, and not for those in folders below. Raises UsageError for one that has
    none, which would pass as right.
    """
    found = []
    for name in names:
        if name == STDIN or not Path(name).is_dir():
            found.append(name)
            continue
        inside = sorted(str(path) for path in Path(name).iterdir() if path.suffix in (".yaml", ".yml", ".json"))
        if not inside:
            raise UsageError(f"`{name}` has no `.yaml`, `.yml` or `.json` in it; folders below it are named one by one")
        found += inside
    return found


def _line(place: str, finding: Finding) -> str:
    mendable = "" if finding.edits else " (not corrected by --fix)"
    return f"{place}: {finding.severity}: {finding.where}: {finding.message} [{finding.rule}]{mendable}"
