"""A machine of the user's own: what a forecast cannot be computed with is refused, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid5d.errors import ConfigErrors
from hybrid5d.plan.hardware import hardware_of, load_hardware

WHOLE = {
    "peak_tflops": "{bf16: 10, fp16: 10, fp32: 5}", "best_matmul": "0.8", "memory_gib": "24", "memory_tbps": "1",
    "link_gbps": "20", "network_gbps": "3",
}  # fmt: skip


def written(folder: Path, **changed: str) -> str:
    path = folder / "card.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in {**WHOLE, **changed}.items()))
    return str(path)


def test_what_a_file_leaves_out_is_the_default(tmp_path: Path) -> None:
    own, h100 = load_hardware(written(tmp_path, link_gbps="40")), load_hardware("h100")
    assert (own.name, own.link_gbps, own.network_latency) == ("card", 40, h100.network_latency)
    one = load_hardware(written(tmp_path, peak_tflops="{fp32: 5}"))
    with pytest.raises(ConfigErrors, match="has no figure for bf16"):
        one.peak("bf16")
    assert own.peak("bf16") == 1e13 and own.memory_seconds(0.89e12) == pytest.approx(1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peak_tflops", "10"),
        ("peak_tflops", "{bf16: 10, int8: 20}"),
        ("peak_tflops", "{bf16: 10, fp16: 10, fp32: 0}"),
        ("matmul_efficiency", "0.5"),
        ("matmul_efficiency", "[[0, 0.5, 1]]"),
        ("matmul_efficiency", "[[1.0e+9, 0.5]]"),
        ("matmul_efficiency", "[[0, 0.5], [1.0e+9, 0.9]]"),
        ("memory_tbps", "0"),
        ("network_gbps", "{a: 1}"),
        ("software", "0"),
        ("link_latency", "-1"),
        ("headroom", "true"),
        ("headroom", "1"),
        ("overlap_dp", "1.01"),
    ],
)
def test_values_that_no_time_can_be_computed_with(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_hardware(written(tmp_path, **{key: value}))
    (error,) = caught.value.errors
    assert error.key == f"--gpu card.yaml: {key}" and "must be" in error.rule


def test_all_faults_at_once_and_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_hardware(written(tmp_path, memory_gib="0", links="3", best_matmul="x"))
    assert {e.key.rpartition(" ")[2] for e in caught.value.errors} == {"memory_gib", "links", "best_matmul"}
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigErrors, match=r"list\.yaml"):
        load_hardware(str(tmp_path / "list.yaml"))


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100", None),
    ],
)
def test_a_card_by_the_name_that_its_driver_gives(card: str, name: str | None) -> None:
    found = hardware_of(card)
    assert (found and found.name) == name
