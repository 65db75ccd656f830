"""The pages build in strict mode, load nothing from other sites, and name the whole public API."""

from __future__ import annotations

import base64
import json
import re
import runpy
from pathlib import Path

import pytest
from mkdocs.config import load_config

import kdist
import kdist.cluster_resolver
import kdist.errors
import kdist.experimental
from tests.docs.search import Search
from tests.helpers.environment import ROOT
from tests.helpers.scripts import run_python
from tests.notebooks import TUTORIALS

# Queries that users type, and the pages that answer them.
SEARCHES = {
    "batch size": ["global-batch/"],
    "DataLoader": ["input/"],
    "dropout": ["limits/", "faq/"],
    "elastic": ["resuming/", "faq/"],
    "fault tolerance": ["resuming/"],
    "FSDP": ["sharding/"],
    "GPU": ["how-to/gpus/"],
    "gradient accumulation": ["mixed-precision/"],
    "hang": ["troubleshooting/"],
    "Kubernetes": ["how-to/kubernetes/"],
    "learning rate": ["global-batch/"],
    "migrate from Horovod": ["migrating/horovod/"],
    "mixed precision": ["mixed-precision/"],
    "model parallel": ["sharding/"],
    "multi-gpu": ["how-to/gpus/"],
    "multi-node": ["how-to/several-machines/"],
    "NCCL timeout": ["troubleshooting/"],
    "out of memory": ["troubleshooting/"],
    "profile": ["measuring/"],
    "resume training": ["resuming/"],
    "save model": ["saving/"],
    "Slurm": ["how-to/slurm/"],
    "speedup": ["measuring/"],
    "tensor parallel": ["sharding/"],
    "TF_CONFIG": ["cluster/"],
    "troubleshoot": ["troubleshooting/"],
    "wandb": ["measuring/"],
    "ZeRO": ["sharding/"],
}


@pytest.fixture(scope="module")
def search(site: Path) -> Search:
    return Search(site)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = ("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    run_python(*command, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]*)"', text)
        loaded += re.findall(
            r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="(https?:[^"]*)"', text
        )
        assert not loaded, page


@pytest.mark.kills("site_words_with_their_punctuation")
@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_the_page_among_the_first_three(search: Search, query: str) -> None:
    first = search.pages(query)[:3]
    assert set(first) & set(SEARCHES[query]), (
        f"{first}: put the words into the title, a heading or the first sentence of the page"
    )


def test_words_are_found_by_their_beginning_and_without_punctuation(search: Search) -> None:
    assert search.pages("fsdp")[0] == search.pages("FSD")[0] == "sharding/"  # the title contains "(FSDP,"
    assert search.pages("xyzzy") == []


def test_the_copy_button_leaves_out_prompts_and_output(site: Path) -> None:
    page = (site / "quickstart" / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<div class="language-console[^"]*">.*?<span class="gp">\$ </span>', page, re.DOTALL)
    css = (site / "site.css").read_text(encoding="utf-8")
    hidden = (
        ".language-console code[data-md-copying] .gp",
        ".language-console code[data-md-copying]:has(.gp) .go",
    )
    rule = re.search(r"([^{}]*)\{\s*display: none;\s*\}", css[css.index("/* The copy button") :])
    assert rule and all(selector in rule[1] for selector in hidden)
    # The theme sets this attribute, reads the visible text, and removes the attribute.
    (script,) = (site / "assets" / "javascripts").glob("bundle.*.js")
    assert re.search(r'"data-md-copying".{0,200}\.innerText', script.read_text(encoding="utf-8"))


def test_each_tutorial_is_a_page_with_its_figures(site: Path) -> None:
    overview = (site / "tutorials" / "index.html").read_text(encoding="utf-8")
    for tutorial in TUTORIALS:
        page = (site / "tutorials" / tutorial.stem / "index.html").read_text(encoding="utf-8")
        cells = json.loads(tutorial.read_text(encoding="utf-8"))["cells"]
        drawn = [
            output
            for cell in cells
            for output in cell.get("outputs", ())
            if "image/png" in output.get("data", ())
        ]
        shown = re.findall(rf'<img alt="[^"]+" class="figure" src="\.\./({tutorial.stem}-\d+\.png)"', page)
        assert len(shown) == len(set(shown)) == len(drawn) > 0
        assert f'href="{tutorial.stem}/"' in overview and f'src="{tutorial.stem}-' in overview
        for figure, output in zip(shown, drawn, strict=True):
            assert (site / "tutorials" / figure).read_bytes() == base64.b64decode(output["data"]["image/png"])


def test_the_addresses_of_the_project_are_those_of_the_site() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    fill_in = runpy.run_path(str(ROOT / "docs" / "theme" / "addresses.py"))["fill_in"]
    assert not fill_in(config, {}).site_url and not config.repo_url
    fill_in(
        config, {"Documentation": "https://docs.test/kdist", "Repository": "https://code.test/team/kdist"}
    )
    assert config.site_url == "https://docs.test/kdist/" and config.repo_name == "team/kdist"


def test_every_public_name_has_an_entry(site: Path) -> None:
    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "api").rglob("*.html"))
    names = [f"kdist.{name}" for name in kdist.__all__ if name != "__version__"]
    names += [f"kdist.experimental.{name}" for name in kdist.experimental.__all__]
    names += [f"kdist.cluster_resolver.{name}" for name in kdist.cluster_resolver.__all__]
    names += [
        f"kdist.errors.{name}"
        for name, value in vars(kdist.errors).items()
        if isinstance(value, type) and value.__module__ == "kdist.errors"
    ]
    missing = [
        name
        for name in names
        if name not in reference and name != "kdist.experimental.CollectiveCommunication"
    ]
    assert not missing


def test_examples_of_docstrings_are_shown_as_code(site: Path) -> None:
    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "api").rglob("*.html"))
    assert "<blockquote>" not in reference and reference.count('<span class="gp">&gt;&gt;&gt; </span>') > 20


def test_each_page_has_a_title_and_a_description_of_its_own(site: Path) -> None:
    seen: dict[str, Path] = {}
    for page in site.rglob("index.html"):
        text = page.read_text(encoding="utf-8")
        (title,) = re.findall(r"<title>(.*?)</title>", text)
        assert title not in seen, f"{page} and {seen[title]}"
        seen[title] = page
        (description,) = re.findall(r'<meta name="description" content="([^"]*)"', text)
        assert 10 < len(description) <= 160, f"{page}: {description}"
    assert len(seen) > 40
    assert "There is no such page" in (site / "404.html").read_text(encoding="utf-8")
    assert not (site / "theme").exists()
