"""Each text that the *Troubleshooting* page quotes is printed when the test provokes the problem."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kdist.errors
from kdist.cluster import timeouts
from tests.docs.symptoms import in_processes, in_workers
from tests.helpers.environment import ROOT
from tests.helpers.processes import BACKENDS, run

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# A heading: its title, and its anchor unless the anchor comes from the title.
HEADING = re.compile(r"^#{3,4} (?P<title>.+?)(?: \{ #(?P<anchor>[\w-]+) \})?$", re.MULTILINE)
# The backends of a symptom, if only some of them print it.
ON = {
    "nobody_described_a_cluster": ("jax",),  # TensorFlow takes longest to list its devices
    "out_of_memory": BACKENDS,
    "too_late_for_devices": ("jax",),
    "no_tpu": ("jax",),
    "coupled_rows": ("torch",),
    "function_of_tensorflow": ("torch",),
    "joined_too_late": ("jax",),
    "different_devices": ("jax",),
    "two_of_one_index": ("torch",),
    "port_that_is_closed": ("torch",),
    "further_ports_that_are_closed": ("torch",),
    "another_token": ("torch",),
}
ENTRIES = {
    "A worker is missing": ["a_worker_is_missing"],
    "Wrong host name": ["host_without_an_address", "host_of_somebody_else"],
    "Port in use": ["port_in_use"],
    "No cluster": ["nobody_described_a_cluster"],
    "Invalid cluster description": ["wrong_tf_config", "two_of_one_index"],
    "Strategy created too late": ["joined_too_late", "too_late_for_devices", "another_cluster"],
    "In a notebook": ["launched_function_fails", "launched_function_does_not_end"],
    "Unknown backend": ["backend_that_is_unknown"],
    "Missing GPU or TPU": ["no_gpu", "no_tpu", "different_devices"],
    "Token": ["another_token"],
    "A worker hangs": ["a_worker_hangs"],
    "Different collectives": ["other_collective"],
    "Barrier timeout": ["barrier_alone"],
    "A lost worker": ["a_worker_is_killed"],
    "Error on another worker": ["callback_fails", "reading_fails"],
    "Exit code 1": ["exit_1"],
    "Exit code 2": ["no_such_script", "python_as_the_script"],
    "Exit code 70": ["exit_70"],
    "Exit code 75": ["exit_75"],
    "Exit codes 130 and 143": ["exit_130", "exit_143"],
    "Exit code 137": ["exit_137"],
    "Out of memory": ["out_of_memory"],
    "Workers disagree": ["other_number_of_rows", "other_model", "saves_alone"],
    "Datasets of different length": ["other_length", "ended_dataset"],
    "Unsupported or misplaced call": ["mixed_strategies", "function_of_tensorflow"],
    "NaN": ["not_a_number"],
    "Different results": ["coupled_rows", "model_from_outside", "other_weights"],
    "No such checkpoint": ["no_checkpoint", "parent_of_checkpoints"],
    "Corrupt checkpoint": ["damaged_checkpoint", "missing_shard"],
    "Checkpoint does not match the model": ["checkpoint_of_another_model", "checkpoint_with_less"],
    "Different versions": ["newer_checkpoint"],
    "Checkpoint cannot be saved": ["folder_cannot_be_written"],
    "Directory is not shared": ["folder_is_not_shared"],
    "Firewall": ["port_that_is_closed", "further_ports_that_are_closed"],
    "Slow training": ["one_is_slow"],
    "Clocks": ["other_clock"],
}
# Entries without a quoted text, and the tests of these symptoms.
ELSEWHERE = {
    "Log lines at startup": "launch/plan_test.py: "
    "test_tensorflow_logs_warnings_and_errors_unless_the_user_sets_a_level",
    "NCCL": "hints_multi_process_test.py: test_nccl_without_gpus_is_a_hint",
    "Hang in the first step": "control/stalls_test.py: test_a_worker_that_works_has_not_hung",
    "Leftover processes": "launch/signals_multi_process_test.py: test_a_killed_launcher_takes_its_workers_along",
}
# Sorted by backend, because each backend's pool is kept for the next test.
CASES = sorted((BACKENDS[position % len(BACKENDS)], entry) for position, entry in enumerate(ENTRIES))


def quoted() -> dict[str, list[str]]:
    """Returns the lines of the quoted texts by entry, except for blocks with a title, from frameworks."""
    found: dict[str, list[str]] = {}
    for entry in re.split(r"^#{2,4} ", PAGE, flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```text\n(.*?)^```", entry, re.MULTILINE | re.DOTALL)
        if blocks:
            title = entry.splitlines()[0].partition(" { #")[0]
            found[title] = "".join(blocks).splitlines()
    return found


def pattern(line: str) -> str:
    """Returns a pattern for a quoted line that matches any number, address and path, and any text for "…"."""
    parts = re.split(r"(…|'[^' ]*[:/][^' ]*'|\b[\w.-]+:\d+\b|\d+(?:\.\d+)?|'checkpoints')", line.strip())
    anything = {"…": ".*"}
    return "".join(
        re.escape(part) if position % 2 == 0 else anything.get(part, r"\S+?")
        for position, part in enumerate(parts)
    )


def provoke(backend: str, name: str, folder: Path) -> str:
    if name in in_processes.CASES:
        return in_processes.CASES[name](folder, backend)
    return "\n".join(run(backend, 2, in_workers.provoke, name, str(folder)))


@pytest.mark.kills(
    torch_closed_port_not_explained="[tensorflow-Firewall]",
    trouble_text_that_nobody_prints="[tensorflow-Different versions]",
)
@pytest.mark.parametrize(
    ("backend", "entry"),
    [pytest.param(*case, marks=pytest.mark.xdist_group(f"pool-{case[0]}")) for case in CASES],
)
@pytest.mark.in_turn(3)
def test_what_goes_wrong_says_what_the_page_quotes(backend: str, entry: str, tmp_path: Path) -> None:
    said = ""
    for name in ENTRIES[entry]:
        for one in ON.get(name, (backend,)):
            (folder := tmp_path / f"{name}-{one}").mkdir()
            said += f"\n{provoke(one, name, folder)}\n"
    for line in quoted()[entry]:
        assert re.search(pattern(line), said), f"{entry}: nothing says {line!r} but\n{said}"
    if "xit code" in entry:
        for code in re.findall(r"\d+", entry):
            assert f"exit code {code}\n" in said, said


def test_every_quoted_text_is_brought_about() -> None:
    assert quoted().keys() == ENTRIES.keys()
    assert {name for names in ENTRIES.values() for name in names} == {*in_workers.CASES, *in_processes.CASES}


def test_every_entry_is_brought_about() -> None:
    titles = {found["title"] for found in HEADING.finditer(PAGE)} - {"Exit codes"}  # a heading of entries
    assert titles == ENTRIES.keys() | ELSEWHERE.keys()
    for place in ELSEWHERE.values():
        path, name = place.split(": ")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), place


def test_every_link_of_the_table_is_an_entry_and_every_entry_is_in_the_table() -> None:
    def anchor(title: str) -> str:
        return re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")

    entries = {found["anchor"] or anchor(found["title"]) for found in HEADING.finditer(PAGE)}
    linked = set(re.findall(r"\]\(#([\w-]+)\)", PAGE))
    assert entries - linked == set(), "no way leads there"
    assert linked - entries <= {"errors"}


@pytest.mark.kills("trouble_error_without_an_entry")
def test_every_error_has_an_entry() -> None:
    table = PAGE.partition("## Errors")[2]
    classes = [
        name
        for name, value in vars(kdist.errors).items()
        if isinstance(value, type) and value.__module__ == "kdist.errors"
    ]
    assert len(classes) > 10
    assert [
        name for name in classes if f"`{name}`" not in table and f"`kdist.errors.{name}`" not in table
    ] == []


@pytest.mark.kills("trouble_exit_code_without_an_entry")
def test_every_exit_code_has_an_entry() -> None:
    codes = {timeouts.PREEMPTED, timeouts.STALLED, 130, 137, 143}
    for path in (ROOT / "kdist").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        codes |= {int(code) for code in re.findall(r"(?:sys\.exit|os\._exit|SystemExit)\((\d+)\)", source)}
        if path.name == "command_line.py":
            codes |= {int(code) for code in re.findall(r"return (\d+)\b", source)}
    described = {
        int(code)
        for title in re.findall(r"^#### Exit codes? (.*)", PAGE, re.MULTILINE)
        for code in re.findall(r"\d+", title)
    }
    assert codes - {0} <= described and {1, 2} <= described
