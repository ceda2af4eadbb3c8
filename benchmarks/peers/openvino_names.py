"""OpenVINO's model of a GGUF file with its linears named: `python -m benchmarks.peers.openvino_names FILE FOLDER`.

OpenVINO GenAI finds the place of an adapter's matrices by the name of a linear, which ends as PyTorch's module does; in
models that it makes of GGUF files linears have numbers instead, so adapters load and change nothing. Here that very
model is saved, and only renamed. Runs in OpenVINO's environment.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import openvino  # type: ignore[import-not-found,unused-ignore]  # lives in the peer's environment
import openvino_genai  # type: ignore[import-not-found,unused-ignore]

MODEL = "openvino_model.xml"
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj")  # fmt: skip
"""Of a layer, in the order in which the model is made."""


def write_named(source: Path, target: Path) -> None:
    """Write the folder whole or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        model = openvino.Core().read_model(saved(source, folder) / MODEL)
        *linears, _ = numbered_linears(model)  # the last one gives the logits
        check(linears)
        for index, linear in enumerate(linears):
            linear.set_friendly_name(f"model.layers.{index // len(LINEARS)}.{LINEARS[index % len(LINEARS)]}")
        part = folder / "named"
        openvino.save_model(model, part / MODEL, compress_to_fp16=False)
        part.rename(target)


def saved(source: Path, folder: Path) -> Path:
    """OpenVINO's own model of the file, which it saves beside it: so it reads a link."""
    link = folder / source.name
    link.symlink_to(source)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    openvino_genai.ContinuousBatchingPipeline(str(link), scheduler, "CPU", {"enable_save_ov_model": True})
    return folder


def numbered_linears(model: Any) -> list[Any]:
    """Products with weights, in the order in which they were made: `MatMul_46`, `MatMul_57`, …"""
    products = [op for op in model.get_ordered_ops() if op.get_type_name() == "MatMul" and _has_weights(op)]
    return sorted(products, key=lambda op: int(op.get_friendly_name().rpartition("_")[2]))


def check(linears: list[Any]) -> None:
    """Every layer has seven, and they have the shapes that such linears have."""
    shapes = [tuple(linear.input(1).get_partial_shape().to_shape()) for linear in linears]
    q, k, v, o, gate, up, down = shapes[: len(LINEARS)]
    is_layer = k == v and q[::-1] == o and gate == up and gate[::-1] == down
    if not is_layer or shapes != shapes[: len(LINEARS)] * (len(shapes) // len(LINEARS)):
        raise SystemExit(f"the linears of OpenVINO's model are not {', '.join(LINEARS)}, layer by layer: {shapes}")


def _has_weights(product: Any) -> bool:
    """Its second input is made of constants: stored in few bits, they are widened and scaled on the way."""
    node = product.input(1).get_source_output().get_node()
    while node.get_input_size():
        node = node.input(0).get_source_output().get_node()
    return bool(node.get_type_name() == "Constant")


if __name__ == "__main__":
    write_named(Path(sys.argv[1]), Path(sys.argv[2]))
