"""The process in which chat templates run. Started by `chat_template.py`, by path, so that it imports jinja2 alone.

A template comes with a model and is a program that we did not write. It runs in jinja2's immutable sandbox, and the
process around it has caps on memory and processor time, may write no file and start no process. What the template
sees is plain JSON. Globals and filters are those that templates at Hugging Face count on.

```text
frame to us   = u32 length | JSON        first {"templates": {name: source}, "limits": {…}}, then {"name", "values"}
frame from us = u32 length | status byte | UTF-8       status: T text, E refused or failed, S does not parse
                                                       the first says that we are up, the second answers the templates
```
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

TEXT, FAILED, UNPARSED = b"T", b"E", b"S"


def main() -> None:
    """Answer frames until the other side closes the pipe."""
    # Frames go out on a copy of stdout; whatever prints by accident ends up nowhere.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # Imports come before the caps: they open files and take processor time of their own.
    environment = make_environment()
    write_frame(out, TEXT, "")
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    setup = json.loads(first)
    limits = setup["limits"]
    _cap_process(limits["memory_bytes"])
    _cap_time(limits["compile_cpu_s"])
    templates, answer = {}, (TEXT, "")
    for name, source in setup["templates"].items():
        try:
            templates[name] = environment.from_string(source)
        except Exception as error:
            answer = (UNPARSED, f"{type(error).__name__}: {error}")
    write_frame(out, *answer)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        request = json.loads(frame)
        _cap_time(limits["cpu_s"])
        write_frame(out, *render(templates[request["name"]], request["values"], limits["output_bytes"]))


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return stream.read(struct.unpack("<I", head)[0])


def write_frame(stream: BinaryIO, status: bytes, text: str) -> None:
    """Send one answer."""
    try:
        payload = text.encode("utf-8")
    except UnicodeEncodeError:
        status, payload = FAILED, b"the result is not valid Unicode"
    stream.write(struct.pack("<I", len(payload) + 1) + status + payload)
    stream.flush()


def render(template: Any, values: dict[str, Any], output_bytes: int) -> tuple[bytes, str]:
    """Status and text of one rendering; the text is cut off with an error once it is too long."""
    parts: list[str] = []
    size_bytes = 0
    try:
        for part in template.generate(**values):
            size_bytes += len(part.encode("utf-8", "surrogatepass"))
            if size_bytes > output_bytes:
                return FAILED, f"the result is longer than {output_bytes} bytes"
            parts.append(part)
    except MemoryError:
        parts.clear()
        return FAILED, "it ran out of memory"
    except RecursionError:
        return FAILED, "it calls itself too deeply"
    except Exception as error:
        return FAILED, f"{error}"[:2000] or type(error).__name__
    return TEXT, "".join(parts)


def make_environment() -> Any:
    """jinja2's immutable sandbox with the settings, globals and filters of Hugging Face's templates."""
    import jinja2
    import jinja2.debug  # else imported at the first error, under the caps
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks what the assistant said; here it is just its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """Refuses names with a leading underscore, which lead into the interpreter."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass `self=`
            for name in dict(*args[1:], **kwargs):
                _refuse_private(name)
            jinja2.utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "namespace": Namespace,
        # The class itself has methods that take code as an argument nowhere, but a function gives away less.
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    environment.filters["tojson"] = _to_json
    return environment


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ValueError(f"`namespace` takes no name that begins with an underscore, such as `{name}`")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _cap_process(memory_bytes: int) -> None:
    caps = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 16,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, cap in caps.items():
        _, hard = resource.getrlimit(kind)
        cap = cap if hard == resource.RLIM_INFINITY else min(cap, hard)
        resource.setrlimit(kind, (cap, cap))


def _cap_time(cpu_s: int) -> None:
    """A last resort beside the parent's deadline: the kernel ends the process that uses more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + cpu_s + 1, hard))


if __name__ == "__main__":
    main()
