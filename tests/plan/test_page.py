"""The HTML page of a forecast: what it holds, and that it needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from tests.cli.test_plan import run_yaml
from tests.cli_kit import hybrid5d

VOID = {"meta", "line", "rect", "br"}


class Reader(HTMLParser):
    """Checks nesting; collects text, tags with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_is_whole_and_shows_what_json_says(tmp_path: Path) -> None:
    run = run_yaml(tmp_path, {}, actor__model__pipeline_model_parallel_size=2, actor__global_batch_size=2)
    words = ("plan", run, "--world-size", 2)
    html, found = hybrid5d(*words, "--format", "html"), json.loads(hybrid5d(*words, "--format", "json").stdout)
    assert html.returncode == 0, html.stderr
    reader = Reader()
    reader.feed(html.stdout)
    assert not reader.open
    text = " ".join(reader.text)
    for stage in found["stages"]:
        assert f"{stage['parameters']:,}" in text
    for warning in found["warnings"]:
        assert warning in text
    for part in found["time"]["parts"]:
        assert part.replace("_", " ") in text
    # nothing is fetched, nothing runs
    assert not re.search(r"https?:|src=|@import|url\(|<script", html.stdout)
    # light and dark; language, title, headings; every table named, every header cell scoped, scrolled by keyboard
    assert "prefers-color-scheme: dark" in html.stdout
    names = [tag for tag, _ in reader.tags]
    assert dict(reader.tags)["html"] == {"lang": "en"} and names.count("h1") == 1 and "main" in names
    assert names.count("caption") == names.count("table") == 5
    assert all(attrs.get("scope") for tag, attrs in reader.tags if tag == "th")
    assert all(attrs.get("tabindex") == "0" for _, attrs in reader.tags if attrs.get("class") == "scroll")
    pictures = [attrs for tag, attrs in reader.tags if tag == "svg"]
    assert len(pictures) == 2 and all(p["role"] == "img" and p["aria-label"] for p in pictures)


def test_text_of_a_user_is_escaped(tmp_path: Path) -> None:
    machine = tmp_path / "<b>card.yaml"
    machine.write_text(
        "{peak_tflops: {fp32: 1}, best_matmul: 1, memory_gib: 1, memory_tbps: 1, link_gbps: 1, network_gbps: 1}"
    )
    run = run_yaml(tmp_path, {}, actor__global_batch_size=2)
    html = hybrid5d("plan", run, "--world-size", 1, "--format", "html", "--gpu", machine)
    assert html.returncode == 0, html.stderr
    assert "&lt;b&gt;card" in html.stdout and "<b>card" not in html.stdout
